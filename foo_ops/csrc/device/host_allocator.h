// Allocator of CPU tensors that replaces torch's and can add guard bytes.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace foo::device {

// A write out of an allocation's bounds: the allocation's address and size, and the first written
// byte, counted from its begin: negative, or at least the size.
using Damage = std::tuple<uintptr_t, int64_t, int64_t>;

// Starts to put guard bytes around CPU memory, on all threads.
void guard_memory();
// Stops, and returns the damage to memory allocated meanwhile.
std::vector<Damage> end_guarded_memory();

bool guards_memory();
c10::DataPtr allocate_guarded(c10::Allocator& allocator, size_t bytes);
// Frees memory if it is guarded, and returns whether it was.
bool free_guarded(void* memory);

// While an instance lives, this thread's new CPU tensors are in memory of a foo device: the results
// of a CPU kernel then become foo tensors without a copy.
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
