// The backward operator of torch's RMS norm, which it has for CUDA alone. The forward one is made
// of smaller operators, and differentiated through them.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>

#include <numeric>
#include <vector>

#include "launch/operator_counts.h"

namespace foo::aten {
namespace {

using at::Tensor;

std::vector<int64_t> range(int64_t first, int64_t last) {
  std::vector<int64_t> numbers(last - first);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_out, const Tensor& input,
                                             at::IntArrayRef normalized_shape, const Tensor& rstd,
                                             const std::optional<Tensor>& weight,
                                             std::array<bool, 2> needed) {
  const int64_t inner = normalized_shape.size(), outer = input.dim() - inner;
  TORCH_CHECK_VALUE(outer >= 0 && input.sizes().slice(outer) == normalized_shape,
                    "_fused_rms_norm_backward: input must end in the sizes ", normalized_shape,
                    ", got ", input.sizes());
  const bool has_weight = weight.has_value() && weight->defined();
  // Half precision is accumulated in float32.
  const auto wide = at::toOpMathType(input.scalar_type());
  const Tensor factor = rstd.to(wide);
  const Tensor normalized = input.to(wide).mul(factor);
  const Tensor grad = grad_out.to(wide);
  Tensor grad_input, grad_weight;
  if (needed[0]) {
    const Tensor scaled = has_weight ? grad * weight->to(wide) : grad;
    const Tensor mean = (normalized * scaled).mean(range(outer, input.dim()), /*keepdim=*/true);
    grad_input = (scaled - normalized * mean).mul_(factor).to(input.scalar_type());
  }
  if (needed[1] && has_weight) {
    const Tensor products = grad * normalized;
    grad_weight = (outer > 0 ? products.sum(range(0, outer)) : products).to(input.scalar_type());
  }
  return {grad_input, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_fused_rms_norm_backward", &rms_norm_backward>(library);
}

}  // namespace foo::aten
