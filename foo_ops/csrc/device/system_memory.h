// The memory of the machine, of which the device takes its own.
#pragma once

#include <cstddef>

#include "launch/huge_pages.h"

namespace foo::device {

// The smallest piece of memory that can be protected.
size_t page_bytes();

size_t physical_memory();

// The bytes that a program can have without swapping. Most of them may hold copies of files, which
// the system gives up when memory is needed, so that the free pages alone can be a hundredth.
size_t available_memory();

// Memory from the system, aligned to huge pages, or null.
char* map_memory(size_t bytes);

}  // namespace foo::device
