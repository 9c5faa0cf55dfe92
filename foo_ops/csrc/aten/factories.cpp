// New tensors.

#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include "device/allocator.h"
#include "device/device.h"
#include "device/guard.h"

namespace foo::aten {
namespace {

constexpr c10::DispatchKeySet kFooKeys(c10::DispatchKey::PrivateUse1);

// "foo" without an index, and no device at all, mean the current device.
device::DeviceGuard guard_for(std::optional<c10::Device> device) {
  return device::DeviceGuard(device::with_index(device.value_or(c10::Device(device::kFoo))));
}

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided,
                              "foo: tensors must have layout ", c10::kStrided, ", got ", *layout);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
}

// torch.use_deterministic_algorithms asks that nobody sees what the memory held before.
at::Tensor fill_if_deterministic(at::Tensor tensor) {
  if (at::globalContext().deterministicAlgorithms() &&
      at::globalContext().deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return tensor;
}

at::Tensor empty(at::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> memory_format) {
  check_options(layout, pin_memory);
  const auto guard = guard_for(device);
  return fill_if_deterministic(at::detail::empty_generic(
      size, &device::allocator(), kFooKeys, c10::dtype_or_default(dtype), memory_format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const auto guard = guard_for(device);
  return fill_if_deterministic(at::detail::empty_strided_generic(
      size, stride, &device::allocator(), kFooKeys, c10::dtype_or_default(dtype)));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
}

}  // namespace foo::aten
