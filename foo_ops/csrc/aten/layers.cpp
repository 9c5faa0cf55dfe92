// Layers for which torch calls special operators on out-of-tree devices.

#include <ATen/Functions.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <numeric>
#include <vector>

#include "aten/fallback.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

void convolution(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const auto general =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  call_on_host(general, keys, stack);
}

// The general operator has one more argument, bias_sizes, after the weight.
void convolution_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                          torch::jit::Stack* stack) {
  static const auto general =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const size_t grad_output = stack->size() - op.schema().arguments().size();
  const int64_t output_channels = (*stack)[grad_output].toTensor().size(1);
  stack->insert(stack->begin() + grad_output + 3, c10::List<int64_t>({output_channels}));
  call_on_host(general, keys, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// Dropout operators take no generator, and the CPU's kernels would draw from the CPU's. torch's
// functions consist of operators that take one: on tensors of foo these draw from foo's.
namespace {

using at::Tensor;

Tensor masked_scale(const Tensor& self, const Tensor& mask, double scale) {
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kByte,
                   "_masked_scale: mask must be of dtype uint8, got ", mask.scalar_type());
  return (self * mask).mul_(scale);
}

// Here p is the probability to keep an element; for other operators, to drop it.
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

// Backward operator of torch's RMS norm, which torch has only for CUDA. The forward operator
// consists of smaller ones and is differentiated through them.
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

// Operators of torch.nn.SyncBatchNorm, which torch has only for CUDA: statistics of this process,
// statistics of all processes, and the normalization with them, forward and backward.
namespace {

using OptionalTensorRef = const std::optional<at::Tensor>&;

// Returns all dimensions but the channels, which are dimension 1: the ones to sum over.
std::vector<int64_t> other_dimensions(const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "foo: input must have at least 2 dimensions, got ",
                    input.dim());
  std::vector<int64_t> dimensions{0};
  for (int64_t dimension = 2; dimension < input.dim(); ++dimension) {
    dimensions.push_back(dimension);
  }
  return dimensions;
}

// Half precision is accumulated in float32, as on CUDA.
at::ScalarType accumulate_type(const at::Tensor& input) {
  const at::ScalarType type = input.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

// Reshapes a number per channel to broadcast with the input.
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

// Computes in float64: the variance of a process is 1 / invstd^2 - eps, where eps may dominate.
std::tuple<at::Tensor, at::Tensor> gather_stats(const at::Tensor& input, const at::Tensor& mean,
                                                const at::Tensor& invstd,
                                                OptionalTensorRef running_mean,
                                                OptionalTensorRef running_var, double momentum,
                                                double eps, const at::Tensor& counts) {
  TORCH_CHECK_VALUE(counts.numel() == mean.size(0), "foo: counts must have ", mean.size(0),
                    " elements, one for each process, got ", counts.numel());
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
