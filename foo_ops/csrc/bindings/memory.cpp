// Binds the device's memory: statistics, blocks and pools.

#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "device/allocator.h"
#include "device/device.h"
#include "device/device_memory.h"
#include "device/guard.h"
#include "device/ownership.h"
#include "device/pinned_memory.h"

namespace py = pybind11;

namespace foo {
namespace {

py::list describe_blocks(const c10::CachingDeviceAllocator::SegmentInfo& segment) {
  py::list blocks;
  size_t address = segment.address + device::kBlockHeaderBytes;
  for (const auto& block : segment.blocks) {
    py::dict description;
    description["address"] = address;
    description["size"] = block.size;
    description["requested_size"] = block.requested_size;
    description["state"] = block.allocated ? "active_allocated" : "inactive";
    blocks.append(description);
    address += block.size + device::kBlockHeaderBytes;
  }
  return blocks;
}

// Describes segments like torch.cuda.memory_snapshot.
py::list memory_snapshot() {
  py::list segments;
  for (const auto& segment : device::memory_snapshot()) {
    py::dict description;
    description["device"] = int{segment.device};
    description["address"] = segment.address;
    description["total_size"] = segment.total_size;
    description["allocated_size"] = segment.allocated_size;
    description["active_size"] = segment.active_size;
    description["requested_size"] = segment.requested_size;
    description["stream"] = 0;
    description["segment_pool_id"] = segment.owner_private_pool_id;
    description["segment_type"] = segment.is_large ? "large" : "small";
    description["blocks"] = describe_blocks(segment);
    segments.append(description);
  }
  return segments;
}

uintptr_t allocate(size_t bytes, int64_t index) {
  device::check_device_index(index);
  const device::DeviceGuard guard(c10::Device(device::kFoo, static_cast<c10::DeviceIndex>(index)));
  return reinterpret_cast<uintptr_t>(device::allocator().raw_allocate(bytes));
}

void deallocate(uintptr_t address) {
  device::allocator().raw_deallocate(reinterpret_cast<void*>(address));
}

// Repeats the call in C++ for the benchmark: a call from Python takes longer than the allocator.
void allocate_and_free(size_t bytes, int64_t index, int64_t times) {
  for (int64_t i = 0; i < times; ++i) deallocate(allocate(bytes, index));
}

// Moves a foo storage to the memory of a CPU storage, which may be shared with other processes.
void place_in(const at::Storage& foo, const at::Storage& host) {
  device::set_memory(foo, device::adopt(host, foo.device()), host.nbytes());
}

device::DeviceMemory& checked_memory_of(int64_t index) {
  device::check_device_index(index);
  return device::memory_of(static_cast<c10::DeviceIndex>(index));
}

void bind_pools(py::module_& module) {
  using device::PoolId;
  module.def("new_pool_id", [] { return device::new_pool_id(/*is_for_capture=*/false); });
  module.def("add_pool_user", [](int64_t index, PoolId id, bool use_on_oom, bool no_split) {
    checked_memory_of(index).add_user(id, {use_on_oom, no_split});
  });
  module.def("remove_pool_user",
             [](int64_t index, PoolId id) { checked_memory_of(index).remove_user(id); });
  module.def("count_pool_users",
             [](int64_t index, PoolId id) { return checked_memory_of(index).count_users(id); });
  module.def("begin_pool", [](int64_t index, PoolId id) {
    device::check_device_index(index);
    device::begin_pool(static_cast<c10::DeviceIndex>(index), id);
  });
  module.def("end_pool", [](int64_t index, PoolId id) {
    device::end_pool(static_cast<c10::DeviceIndex>(index), id);
  });
}

}  // namespace

void bind_memory(py::module_& module) {
  module.def("memory_snapshot", &memory_snapshot);
  bind_pools(module);
  module.def("set_memory_fraction", &device::set_memory_fraction);
  module.def("memory_fraction", &device::memory_fraction);
  module.def("allocate", &allocate);
  module.def("deallocate", &deallocate);
  module.def("allocate_and_free", &allocate_and_free);
  module.def("place_in", &place_in);
  module.def("pinned_memory_stats", &device::pinned_memory_stats);
  module.def("reset_accumulated_pinned_memory_stats",
             &device::reset_accumulated_pinned_memory_stats);
  module.def("reset_peak_pinned_memory_stats", &device::reset_peak_pinned_memory_stats);
}

}  // namespace foo
