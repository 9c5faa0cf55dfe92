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

// Option for scores without a soft cap.
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

using VarlenForward = std::tuple<Tensor, Tensor>(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, const OptionalTensor& seqused_k, const OptionalTensor& block_table,
    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks, const OptionalTensor& seed,
    int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale, double dropout_p,
    int64_t window_left, int64_t window_right, double softcap);

using VarlenBackward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor& grad_output, const Tensor& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    const OptionalTensor& seqused_k, const OptionalTensor& block_table,
    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks, const Tensor& output,
    const Tensor& logsumexp, const OptionalTensor& seed, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, double dropout_p, int64_t window_left, int64_t window_right,
    double softcap);

template <class Signature>
auto typed_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Makes a tensor of other sizes whose dimensions have the query's memory order.
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

Tensor laid_out_like(const Tensor& query, const Tensor& result) {
  Tensor like = at::empty_like(query);
  return like.strides() == result.strides() ? result : like.copy_(result);
}

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const OptionalTensor& mask, const OptionalTensor& seed,
                                     const AttentionOptions& options) {
  static const auto forward = typed_operator<Forward>("foo::attention_seeded");
  return forward.call(query, key, value, defined_or_none(mask), options.alibi_slopes, std::nullopt,
                      seed, options.is_causal, options.scale, options.dropout_p,
                      options.window_left, options.window_right, kNoSoftcap);
}

AttentionGradients attention_backward(const Tensor& grad_output, const Tensor& query,
                                      const Tensor& key, const Tensor& value,
                                      const OptionalTensor& mask, const Tensor& output,
                                      const Tensor& logsumexp, const OptionalTensor& seed,
                                      bool mask_requires_grad, const AttentionOptions& options) {
  static const auto backward = typed_operator<Backward>("foo::attention_backward");
  const auto [grad_query, grad_key, grad_value, grad_mask, grad_slopes, grad_sinks] =
      backward.call(grad_output, at::zeros_like(logsumexp), query, key, value,
                    defined_or_none(mask), options.alibi_slopes, std::nullopt, output, logsumexp,
                    seed, mask_requires_grad, options.is_causal, options.scale, options.dropout_p,
                    options.window_left, options.window_right, kNoSoftcap);
  return {grad_query, grad_key, grad_value, mask_requires_grad ? grad_mask : Tensor()};
}

std::tuple<Tensor, Tensor> attention_varlen(const Tensor& query, const Tensor& key,
                                            const Tensor& value, const PackedSequences& sequences,
                                            const OptionalTensor& seed,
                                            const AttentionOptions& options) {
  static const auto forward = typed_operator<VarlenForward>("foo::attention_varlen_seeded");
  return forward.call(query, key, value, sequences.starts_q, sequences.starts_k, sequences.used_k,
                      sequences.block_table, options.alibi_slopes, std::nullopt, seed,
                      sequences.longest_q, sequences.longest_k, options.scale, options.dropout_p,
                      options.window_left, options.window_right, kNoSoftcap);
}

AttentionGradients attention_varlen_backward(const Tensor& grad_output, const Tensor& query,
                                             const Tensor& key, const Tensor& value,
                                             const PackedSequences& sequences, const Tensor& output,
                                             const Tensor& logsumexp, const OptionalTensor& seed,
                                             const AttentionOptions& options) {
  static const auto backward = typed_operator<VarlenBackward>("foo::attention_varlen_backward");
  const auto [grad_query, grad_key, grad_value, grad_slopes, grad_sinks] = backward.call(
      grad_output, at::zeros_like(logsumexp), query, key, value, sequences.starts_q,
      sequences.starts_k, sequences.used_k, sequences.block_table, options.alibi_slopes,
      std::nullopt, output, logsumexp, seed, sequences.longest_q, sequences.longest_k,
      options.scale, options.dropout_p, options.window_left, options.window_right, kNoSoftcap);
  return {grad_query, grad_key, grad_value, Tensor()};
}

}  // namespace foo::aten
