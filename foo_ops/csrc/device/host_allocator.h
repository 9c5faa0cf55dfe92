// The allocator of CPU tensors, in the place of torch's, which may guard what it gives.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace foo::device {

// Memory of the CPU between guard bytes, which tell whether someone has written beside it.

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

// The allocator of CPU tensors, in the place of torch's.

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
