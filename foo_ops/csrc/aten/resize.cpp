// In-place changes of a tensor's storage and sizes.
//
// torch's functions for the CPU do it for any host memory, from the allocator of the storage. Ours
// serves the current device, so that must be the device of the tensor.

#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>

#include "device/allocator.h"
#include "device/guard.h"
#include "launch/operator_counts.h"

namespace foo::aten {
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

}  // namespace foo::aten
