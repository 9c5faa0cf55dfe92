// The allocator of CPU tensors, in the place of torch's.
#pragma once

#include <c10/core/Device.h>

namespace foo::device {

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
