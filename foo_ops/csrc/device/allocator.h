// Device memory: host memory that is kept for the next tensor, counted and limited per device.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <optional>
#include <vector>

namespace foo::device {

c10::DeviceAllocator& allocator();

// Memory of a storage of the CPU, from now on memory of `device` as well: no byte moves, and the
// statistics of the device count it until it is freed. The storage can no longer be resized.
c10::DataPtr adopt(c10::Storage host, c10::Device device);

// Whether the memory comes from allocator().allocate or adopt, so that share makes it that of a
// storage on any device.
bool is_own_memory(const c10::DataPtr& memory);

// The memory of a storage once more, for another storage: it is freed with the last of them, also
// when one of them moves elsewhere. Memory that is copied on writing stays so. Memory that neither
// allocate nor adopt gave lives as long as `storage`.
c10::DataPtr share(const c10::Storage& storage, c10::Device device);

// The device in whose memory an address lies.
std::optional<c10::DeviceIndex> device_of_address(const void* address);

// How much of its total memory a device may reserve, from 0 to 1.
void set_memory_fraction(double fraction, c10::DeviceIndex index);
double memory_fraction(c10::DeviceIndex index);

// Before the memory of each block in a segment.
inline constexpr size_t kBlockHeaderBytes = 64;

std::vector<c10::CachingDeviceAllocator::SegmentInfo> memory_snapshot();

// While one lives, CPU tensors that this thread makes lie in memory of a device of foo: the
// results of a CPU kernel then need no copy to become tensors of foo.
class HostTensorsInDeviceMemory {
 public:
  explicit HostTensorsInDeviceMemory(c10::DeviceIndex index);
  ~HostTensorsInDeviceMemory();
  HostTensorsInDeviceMemory(const HostTensorsInDeviceMemory&) = delete;
  HostTensorsInDeviceMemory& operator=(const HostTensorsInDeviceMemory&) = delete;

 private:
  c10::DeviceIndex previous_;
};

}  // namespace foo::device
