#include "aten/attention_operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_permuted.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>

namespace foo::aten {
namespace {

using at::Tensor;

// The options that stand for no window and no cap of the scores.
constexpr int64_t kNoWindow = -1;
constexpr double kNoSoftcap = 0.0;

OptionalTensor defined_or_none(const OptionalTensor& tensor) {
  return has_value(tensor) ? tensor : std::nullopt;
}

using Forward = std::tuple<Tensor, Tensor>(const Tensor& query, const Tensor& key,
                                           const Tensor& value, const OptionalTensor& attn_bias,
                                           const OptionalTensor& alibi_slopes,
                                           const OptionalTensor& sinks, const OptionalTensor& seed,
                                           bool is_causal, std::optional<double> scale,
                                           double dropout_p, c10::SymInt window_left,
                                           c10::SymInt window_right, double softcap);

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor& grad_output, const Tensor& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, const Tensor& output, const Tensor& logsumexp,
    const OptionalTensor& seed, bool attn_bias_requires_grad, bool is_causal,
    std::optional<double> scale, double dropout_p, c10::SymInt window_left,
    c10::SymInt window_right, double softcap);

// Makes a tensor of other sizes whose dimensions lie in memory in the order of those of the query.
Tensor empty_in_order_of(const Tensor& query, at::IntArrayRef sizes) {
  if (query.sizes() == sizes) return at::empty_like(query);
  std::array<int64_t, 4> order = {0, 1, 2, 3};
  std::stable_sort(order.begin(), order.end(), [&](int64_t one, int64_t other) {
    return query.stride(one) > query.stride(other);
  });
  return at::empty_permuted(sizes, order, query.options());
}

}  // namespace

Tensor in_order_of(const Tensor& query, Tensor result) {
  if (!result.defined() || result.strides() == query.strides()) return result;
  Tensor ordered = empty_in_order_of(query, result.sizes());
  return ordered.strides() == result.strides() ? result : ordered.copy_(result);
}

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const OptionalTensor& mask, const OptionalTensor& seed,
                                     const AttentionOptions& options) {
  static const auto forward =
      c10::Dispatcher::singleton().findSchemaOrThrow("foo::attention_seeded", "").typed<Forward>();
  return forward.call(query, key, value, defined_or_none(mask), std::nullopt, std::nullopt, seed,
                      options.is_causal, options.scale, options.dropout_p, kNoWindow, kNoWindow,
                      kNoSoftcap);
}

AttentionGradients attention_backward(const Tensor& grad_output, const Tensor& query,
                                      const Tensor& key, const Tensor& value,
                                      const OptionalTensor& mask, const Tensor& output,
                                      const Tensor& logsumexp, const OptionalTensor& seed,
                                      bool mask_requires_grad, const AttentionOptions& options) {
  static const auto backward = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("foo::attention_backward", "")
                                   .typed<Backward>();
  const auto [grad_query, grad_key, grad_value, grad_mask, grad_slopes, grad_sinks] = backward.call(
      grad_output, at::zeros_like(logsumexp), query, key, value, defined_or_none(mask),
      std::nullopt, std::nullopt, output, logsumexp, seed, mask_requires_grad, options.is_causal,
      options.scale, options.dropout_p, kNoWindow, kNoWindow, kNoSoftcap);
  return {grad_query, grad_key, grad_value, mask_requires_grad ? grad_mask : Tensor()};
}

}  // namespace foo::aten
