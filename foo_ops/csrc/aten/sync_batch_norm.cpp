// The operators of torch.nn.SyncBatchNorm, which torch has for CUDA alone: statistics of this
// process, those of all processes, and what is done with them, forward and backward.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/Resize.h>

#include "launch/operator_counts.h"

namespace foo::aten {
namespace {

using OptionalTensorRef = const std::optional<at::Tensor>&;

// Channels are dimension 1. Sums go over all others.
std::vector<int64_t> other_dimensions(const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "foo: input must have at least 2 dimensions, got ",
                    input.dim());
  std::vector<int64_t> dimensions{0};
  for (int64_t dimension = 2; dimension < input.dim(); ++dimension) {
    dimensions.push_back(dimension);
  }
  return dimensions;
}

// Half precision is accumulated in float32, as CUDA does.
at::ScalarType accumulate_type(const at::Tensor& input) {
  const at::ScalarType type = input.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

// A number for each channel, shaped to meet the input.
at::Tensor along_channels(const at::Tensor& numbers, const at::Tensor& input) {
  std::vector<int64_t> sizes(input.dim(), 1);
  sizes[1] = numbers.numel();
  return numbers.to(accumulate_type(input)).view(sizes);
}

at::Tensor centered(const at::Tensor& input, const at::Tensor& mean) {
  return input.to(accumulate_type(input)) - along_channels(mean, input);
}

std::tuple<at::Tensor, at::Tensor> batch_norm_stats(const at::Tensor& input, double eps) {
  const auto [variance, mean] =
      at::var_mean(input.to(accumulate_type(input)), other_dimensions(input), /*correction=*/0);
  return {mean, (variance + eps).rsqrt()};
}

void update_running(OptionalTensorRef running, const at::Tensor& now, double momentum) {
  if (!running.has_value() || !running->defined()) return;
  running->mul_(1 - momentum).add_(now.to(running->scalar_type()), momentum);
}

// In float64: the variance of a process is 1 / invstd^2 - eps, where eps may be the larger part.
std::tuple<at::Tensor, at::Tensor> gather_stats(const at::Tensor& input, const at::Tensor& mean,
                                                const at::Tensor& invstd,
                                                OptionalTensorRef running_mean,
                                                OptionalTensorRef running_var, double momentum,
                                                double eps, const at::Tensor& counts) {
  TORCH_CHECK_VALUE(counts.numel() == mean.size(0),
                    "foo: counts must have a number for each of the ", mean.size(0),
                    " processes, got ", counts.numel());
  const at::Tensor weights = counts.to(at::kDouble).view({-1, 1});
  const at::Tensor total = weights.sum();
  const at::Tensor means = mean.to(at::kDouble);
  const at::Tensor all_mean = (weights * means).sum(0) / total;
  const at::Tensor variances = invstd.to(at::kDouble).pow(-2) - eps;
  const at::Tensor squares = (weights * (variances + (means - all_mean).square())).sum(0);
  update_running(running_mean, all_mean, momentum);
  update_running(running_var, squares / (total - 1), momentum);
  const auto type = accumulate_type(input);
  return {all_mean.to(type), (squares / total + eps).rsqrt().to(type)};
}

std::tuple<at::Tensor, at::Tensor> batch_norm_gather_stats(
    const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd,
    OptionalTensorRef running_mean, OptionalTensorRef running_var, double momentum, double eps,
    int64_t count) {
  const at::Tensor counts = at::full({mean.size(0)}, count, mean.options().dtype(at::kDouble));
  return gather_stats(input, mean, invstd, running_mean, running_var, momentum, eps, counts);
}

at::Tensor scale_of(OptionalTensorRef weight, const at::Tensor& invstd) {
  return weight.has_value() && weight->defined() ? invstd * weight->to(invstd.scalar_type())
                                                 : invstd;
}

at::Tensor batch_norm_elemt(const at::Tensor& input, OptionalTensorRef weight,
                            OptionalTensorRef bias, const at::Tensor& mean,
                            const at::Tensor& invstd, double) {
  at::Tensor result = centered(input, mean).mul_(along_channels(scale_of(weight, invstd), input));
  if (bias.has_value() && bias->defined()) result.add_(along_channels(*bias, input));
  return result.to(input.scalar_type());
}

at::Tensor& batch_norm_elemt_out(const at::Tensor& input, OptionalTensorRef weight,
                                 OptionalTensorRef bias, const at::Tensor& mean,
                                 const at::Tensor& invstd, double eps, at::Tensor& out) {
  const at::Tensor result = foo::aten::batch_norm_elemt(input, weight, bias, mean, invstd, eps);
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(
    const at::Tensor& grad_out, const at::Tensor& input, const at::Tensor& mean,
    const at::Tensor& invstd, OptionalTensorRef weight, bool input_g, bool weight_g, bool bias_g) {
  const auto dimensions = other_dimensions(input);
  const at::Tensor grad = grad_out.to(accumulate_type(input));
  const at::Tensor sum = grad.sum(dimensions);
  const at::Tensor centered_sum = (grad * centered(input, mean)).sum(dimensions);
  const bool has_weight = weight.has_value() && weight->defined();
  const auto type = has_weight ? weight->scalar_type() : accumulate_type(input);
  return {input_g ? sum : at::Tensor(), input_g ? centered_sum : at::Tensor(),
          weight_g ? (centered_sum * invstd).to(type) : at::Tensor(),
          bias_g ? sum.to(type) : at::Tensor()};
}

at::Tensor batch_norm_backward_elemt(const at::Tensor& grad_out, const at::Tensor& input,
                                     const at::Tensor& mean, const at::Tensor& invstd,
                                     OptionalTensorRef weight, const at::Tensor& sum_dy,
                                     const at::Tensor& sum_dy_xmu, const at::Tensor& count) {
  const at::Tensor total = count.sum().to(invstd.scalar_type());
  const at::Tensor slope = invstd.square() * sum_dy_xmu / total;
  const at::Tensor grad = grad_out.to(accumulate_type(input)) -
                          along_channels(sum_dy / total, input) -
                          centered(input, mean).mul_(along_channels(slope, input));
  return (grad * along_channels(scale_of(weight, invstd), input)).to(input.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::batch_norm_stats", &batch_norm_stats>(library);
  register_own_kernel<"aten::batch_norm_gather_stats", &batch_norm_gather_stats>(library);
  register_own_kernel<"aten::batch_norm_gather_stats_with_counts", &gather_stats>(library);
  register_own_kernel<"aten::batch_norm_elemt", &batch_norm_elemt>(library);
  register_own_kernel<"aten::batch_norm_elemt.out", &batch_norm_elemt_out>(library);
  register_own_kernel<"aten::batch_norm_backward_reduce", &batch_norm_backward_reduce>(library);
  register_own_kernel<"aten::batch_norm_backward_elemt", &batch_norm_backward_elemt>(library);
}

}  // namespace foo::aten
