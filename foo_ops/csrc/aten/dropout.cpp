// Operators of dropout take no generator, and the CPU's kernels would draw from that of the CPU.
// torch's functions are made of operators that take one: on tensors of foo these draw from foo's.

#include <ATen/ops/native_dropout_native.h>

#include "launch/operator_counts.h"

namespace foo::aten {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::native_dropout", &at::native::native_dropout_cpu>(library);
}

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, library) {
  register_own_kernel<"aten::native_dropout", &at::native::native_dropout_nested>(library);
}

}  // namespace foo::aten
