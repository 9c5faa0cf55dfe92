// Memory of the CPU between guard bytes, which tell whether someone has written beside it.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace foo::device {

// What was written beside an allocation: its address, its bytes, and the first of those that were
// written, counted from its begin, so that it is negative, or the number of bytes and more.
using Damage = std::tuple<uintptr_t, int64_t, int64_t>;

// From now on memory of the CPU is guarded, on every thread.
void guard_memory();
// Until now. Returns what was written beside memory that was allocated meanwhile.
std::vector<Damage> end_guarded_memory();

bool guards_memory();
c10::DataPtr allocate_guarded(c10::Allocator& allocator, size_t bytes);
// Whether the memory is guarded, and so has been freed.
bool free_guarded(void* memory);

}  // namespace foo::device
