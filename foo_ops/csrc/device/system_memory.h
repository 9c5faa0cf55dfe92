// The memory of the machine, of which the device takes its own.
#pragma once

#include <cstddef>

namespace foo::device {

// A huge page of the processor. Segments are aligned to it.
inline constexpr size_t kHugePage = size_t{2} << 20;

// The smallest piece of memory that can be protected.
size_t page_bytes();

size_t physical_memory();

// The bytes that a program can have without swapping. Most of them may hold copies of files, which
// the system gives up when memory is needed, so that the free pages alone can be a hundredth.
size_t available_memory();

// Aligned memory from the system, or null. Transparent huge pages take fewer faults to touch.
char* map_memory(size_t bytes);

}  // namespace foo::device
