#include "device/host_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <utility>

#include "device/device.h"
#include "device/guarded_memory.h"
#include "device/ownership.h"
#include "device/segment_map.h"
#include "launch/device_access.h"

namespace foo::device {
namespace {

// Where the results of CPU kernels that this thread runs for foo are to lie.
thread_local c10::DeviceIndex target_of_host_tensors = kNoDevice;

// torch's own allocator of the CPU, under ours.
c10::Allocator* host_allocator = nullptr;

// oneDNN allocates raw memory and may free it at any later time.
void free_raw(void* data) {
  if (device_of_address(data).has_value()) {
    free_block(data);
  } else if (!free_guarded(data)) {
    host_allocator->raw_deallocate(data);
  }
}

// Stands for the allocator of the CPU, and for one of foo while a thread wants that.
class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (C10_LIKELY(target_of_host_tensors == kNoDevice)) {
      // Empty tensors have no memory.
      const bool is_guarded = guards_memory() && bytes > 0;
      if (C10_UNLIKELY(is_guarded)) return allocate_guarded(*host_allocator, bytes);
      return host_allocator->allocate(bytes);
    }
    return allocate_on(target_of_host_tensors, bytes, c10::Device(c10::kCPU));
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }

  bool is_simple_data_ptr(const c10::DataPtr& memory) const override { return is_unshared(memory); }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    const DeviceAccess access;
    default_copy_data(destination, source, bytes);
  }
};

const bool allocator_registered = [] {
  host_allocator = c10::GetCPUAllocator();
  // Never destroyed, as torch keeps the pointer. A priority above the default's replaces it.
  c10::SetCPUAllocator(new HostAllocator(), 1);
  return true;
}();

}  // namespace

HostTensorsInDeviceMemory::HostTensorsInDeviceMemory(c10::DeviceIndex index)
    : previous_(std::exchange(target_of_host_tensors, index)) {}

HostTensorsInDeviceMemory::~HostTensorsInDeviceMemory() {
  target_of_host_tensors = previous_;
}

}  // namespace foo::device
