// Operators without work on elements: new tensors, views, other sizes, other memory.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_nested_view_from_buffer_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include "device/allocator.h"
#include "device/device.h"
#include "device/guard.h"
#include "device/observer.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

constexpr c10::DispatchKeySet kFooKeys(c10::DispatchKey::PrivateUse1);

// Selects the device; "foo" without an index, or no device at all, means the current one.
device::DeviceGuard guard_for(std::optional<c10::Device> device) {
  return device::DeviceGuard(device::with_index(device.value_or(c10::Device(device::kFoo))));
}

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided,
                              "foo: tensors must have layout ", c10::kStrided, ", got ", *layout);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
}

// Returns a tensor with new memory on the current device, whose sizes are still to be set.
at::Tensor allocate_tensor(size_t bytes, std::optional<c10::ScalarType> dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(
      device::make_storage(device::allocator().allocate(bytes), bytes), kFooKeys,
      c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)));
}

// Fills new memory under torch.use_deterministic_algorithms, which hides earlier contents.
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

// Views have new sizes and strides over the same storage.

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::as_strided", &at::native::as_strided_tensorimpl>(library);
  register_own_kernel<"aten::view", &at::native::view>(library);
  register_own_kernel<"aten::_reshape_alias", &at::native::_reshape_alias>(library);
  register_own_kernel<"aten::unfold", &at::native::unfold>(library);
  register_own_kernel<"aten::view_as_real", &at::native::view_as_real>(library);
  register_own_kernel<"aten::view_as_complex", &at::native::view_as_complex>(library);
  // Sizes of nested tensors are on the CPU for every device.
  register_own_kernel<"aten::_nested_view_from_buffer", &at::native::_nested_view_from_buffer,
                      Devices::kAny>(library);
}

TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, library) {
  register_own_kernel<"aten::as_strided", &at::native::as_strided_qtensorimpl>(library);
  register_own_kernel<"aten::view", &at::native::view>(library);
  register_own_kernel<"aten::_reshape_alias", &at::native::_reshape_alias>(library);
  register_own_kernel<"aten::unfold", &at::native::unfold>(library);
}

// In-place changes of a tensor's storage and sizes.
//
// torch's CPU functions change any host memory, with the storage's allocator. Our allocator serves
// the current device, so that must be the tensor's device.
namespace {

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<c10::MemoryFormat> memory_format) {
  const device::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, memory_format);
}

at::Tensor& set_storage_(at::Tensor& self, c10::Storage source, int64_t storage_offset,
                         at::IntArrayRef size, at::IntArrayRef stride) {
  const device::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, std::move(source), storage_offset, size, stride);
}

at::Tensor& set_to_empty_(at::Tensor& self) {
  const device::DeviceGuard guard(self.device());
  c10::Storage empty(c10::Storage::use_byte_size_t(), 0, &device::allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(empty), 0, {0}, {});
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::resize_", &resize_>(library);
  register_own_kernel<"aten::set_", &set_to_empty_>(library);
  register_own_kernel<"aten::set_.source_Tensor", &at::native::set_tensor_>(library);
  register_own_kernel<"aten::set_.source_Storage",
                      static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_)>(
      library);
  register_own_kernel<"aten::set_.source_Storage_storage_offset", &set_storage_>(library);
}

TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, library) {
  register_own_kernel<"aten::set_.source_Storage_storage_offset",
                      &at::native::set_storage_quantized_>(library);
}

// `tensor.data = other` between the CPU and foo, and with it Module.to, which keeps its parameters:
// weights stay tied, and an optimizer that holds them continues to work. torch allows this between
// a list of devices that does not contain foo.
namespace {

c10::DispatchKeySet as_on_cpu(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  if (tensor.device().type() != device::kFoo) return keys;
  return keys.remove_backend(c10::BackendComponent::PrivateUse1Bit) |
         c10::DispatchKeySet(c10::BackendComponent::CPUBit);
}

// At least one of the two tensors is on foo.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  if (self.is_cpu()) {
    return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(as_on_cpu(from));
  }
  if (from.is_cpu()) {
    return from.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(as_on_cpu(self));
  }
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

// Every operator is done when it returns: no stream can still be using a freed tensor. The
// sanitizer finds code that forgets record_stream on other devices.
namespace {

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (self.has_storage()) device::allocator().recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::record_stream", &record_stream>(library);
}

}  // namespace foo::aten
