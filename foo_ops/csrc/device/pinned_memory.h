// Pinned host memory. All memory of this device is host memory and no transfer needs pinned memory,
// but code for accelerators allocates it and checks that it got it.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <string>

namespace foo::device {

// Raises in a forked child of a process that has touched the device.
c10::Allocator& pinned_memory_allocator();

// Returns statistics of the cache, with the names of torch.cuda.host_memory_stats.
std::map<std::string, int64_t> pinned_memory_stats();
void reset_accumulated_pinned_memory_stats();
void reset_peak_pinned_memory_stats();

// Whether a block of that allocator contains the address.
bool is_pinned(const void* address);

}  // namespace foo::device
