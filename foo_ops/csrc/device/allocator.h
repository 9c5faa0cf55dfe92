// Device memory: host memory, aligned for the widest vectors, counted per device.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

namespace foo::device {

// Also the width of a cache line and of an AVX-512 register.
inline constexpr size_t kAlignment = 64;

c10::DeviceAllocator& allocator();

// Memory of a storage that a CPU kernel allocated, from now on memory of `device`: no byte moves,
// and the statistics of the device count it until it is freed.
c10::DataPtr adopt(c10::Storage host, c10::Device device);

// Whether the memory comes from allocator().allocate and so changes its device by a change of
// label.
bool is_own_memory(const c10::DataPtr& memory);

}  // namespace foo::device
