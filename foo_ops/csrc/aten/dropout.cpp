// Operators of dropout take no generator, and the CPU's kernels would draw from that of the CPU.
// torch's functions are made of operators that take one: on tensors of foo these draw from foo's.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/zeros_like.h>

#include "launch/operator_counts.h"

namespace foo::aten {
namespace {

using at::Tensor;

Tensor masked_scale(const Tensor& self, const Tensor& mask, double scale) {
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kByte,
                   "_masked_scale: mask must be of dtype uint8, got ", mask.scalar_type());
  return (self * mask).mul_(scale);
}

// Keeps an element with probability p, where other operators drop it with that.
std::tuple<Tensor, Tensor> fused_dropout(const Tensor& self, double p,
                                         std::optional<at::Generator> generator) {
  const Tensor mask = at::empty_like(self, self.options().dtype(at::kByte));
  mask.bernoulli_(p, std::move(generator));
  return {p > 0 ? masked_scale(self, mask, 1 / p) : at::zeros_like(self), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::native_dropout", &at::native::native_dropout_cpu>(library);
  register_own_kernel<"aten::_fused_dropout", &fused_dropout>(library);
  register_own_kernel<"aten::_masked_scale", &masked_scale>(library);
}

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, library) {
  register_own_kernel<"aten::native_dropout", &at::native::native_dropout_nested>(library);
}

}  // namespace foo::aten
