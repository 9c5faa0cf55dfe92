// Views have new sizes and strides over the same storage.

#include <ATen/ops/_nested_view_from_buffer_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include "launch/operator_counts.h"

namespace foo::aten {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::as_strided", &at::native::as_strided_tensorimpl>(library);
  register_own_kernel<"aten::view", &at::native::view>(library);
  register_own_kernel<"aten::_reshape_alias", &at::native::_reshape_alias>(library);
  register_own_kernel<"aten::unfold", &at::native::unfold>(library);
  register_own_kernel<"aten::view_as_real", &at::native::view_as_real>(library);
  register_own_kernel<"aten::view_as_complex", &at::native::view_as_complex>(library);
  // The sizes of nested tensors are on the CPU on every device.
  register_own_kernel<"aten::_nested_view_from_buffer", &at::native::_nested_view_from_buffer,
                      Devices::kAny>(library);
}

TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, library) {
  register_own_kernel<"aten::as_strided", &at::native::as_strided_qtensorimpl>(library);
  register_own_kernel<"aten::view", &at::native::view>(library);
  register_own_kernel<"aten::_reshape_alias", &at::native::_reshape_alias>(library);
  register_own_kernel<"aten::unfold", &at::native::unfold>(library);
}

}  // namespace foo::aten
