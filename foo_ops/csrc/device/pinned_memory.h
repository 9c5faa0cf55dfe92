// Pinned host memory. All memory of this device is host memory and no transfer needs it, but code
// for accelerators asks for it, and asks whether it got it.
#pragma once

#include <c10/core/Allocator.h>

namespace foo::device {

c10::Allocator& pinned_memory_allocator();

// Whether the address lies in a block of that allocator.
bool is_pinned(const void* address);

}  // namespace foo::device
