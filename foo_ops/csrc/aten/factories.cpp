// Factories of new tensors.

#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>

#include "device/allocator.h"
#include "device/device.h"
#include "device/guard.h"
#include "device/observer.h"
#include "device/storage.h"
#include "launch/operator_counts.h"

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

// Returns a tensor of no particular sizes over new memory of the current device.
at::Tensor allocate_tensor(size_t bytes, std::optional<c10::ScalarType> dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(
      device::make_storage(device::allocator().allocate(bytes), bytes), kFooKeys,
      c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)));
}

// torch.use_deterministic_algorithms asks that nobody sees what the memory held before.
at::Tensor fill_if_deterministic(at::Tensor tensor) {
  if (at::globalContext().deterministicAlgorithms() &&
      at::globalContext().deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(tensor);
    device::observe([&](device::Observer& observer) {
      observer.written(tensor.storage().data(), tensor.storage().nbytes());
    });
  }
  return tensor;
}

at::Tensor empty(at::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> memory_format) {
  check_options(layout, pin_memory);
  const auto guard = guard_for(device);
  at::detail::check_size_nonnegative(size);
  const size_t itemsize = c10::elementSize(c10::dtype_or_default(dtype));
  at::Tensor tensor =
      allocate_tensor(at::detail::computeStorageNbytesContiguous(size, itemsize), dtype);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  impl->empty_tensor_restride(memory_format.value_or(c10::MemoryFormat::Contiguous));
  return fill_if_deterministic(std::move(tensor));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const auto guard = guard_for(device);
  at::detail::check_size_nonnegative(size);
  const size_t itemsize = c10::elementSize(c10::dtype_or_default(dtype));
  at::Tensor tensor =
      allocate_tensor(at::detail::computeStorageNbytes(size, stride, itemsize), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return fill_if_deterministic(std::move(tensor));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::empty.memory_format", &empty>(library);
  register_own_kernel<"aten::empty_strided", &empty_strided>(library);
}

}  // namespace foo::aten
