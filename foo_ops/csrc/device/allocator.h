// Device memory: host memory that is kept for the next tensor, counted and limited per device.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <vector>

namespace foo::device {

c10::DeviceAllocator& allocator();

// How much of its total memory a device may reserve, from 0 to 1.
void set_memory_fraction(double fraction, c10::DeviceIndex index);
double memory_fraction(c10::DeviceIndex index);

// Before the memory of each block in a segment.
inline constexpr size_t kBlockHeaderBytes = 64;

std::vector<c10::CachingDeviceAllocator::SegmentInfo> memory_snapshot();

}  // namespace foo::device
