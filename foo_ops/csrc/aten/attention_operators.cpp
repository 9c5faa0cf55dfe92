#include "aten/attention_operators.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_permuted.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "launch/registration.h"

namespace foo::aten {
namespace {

using at::Tensor;

OptionalTensor defined_or_none(const OptionalTensor& tensor) {
  return has_value(tensor) ? tensor : std::nullopt;
}

// Names of arguments that all of attention's operators have, in the order of `call`.
const std::vector<std::string> kCommon = {"alibi_slopes", "scale", "dropout_p", "window_left",
                                          "window_right"};

NamedCall named_call(const char* name, std::initializer_list<const char*> others) {
  std::vector<std::string> names(others.begin(), others.end());
  names.insert(names.end(), kCommon.begin(), kCommon.end());
  return {name, names};
}

template <size_t count>
torch::jit::Stack call(const NamedCall& operator_, const AttentionOptions& options,
                       c10::IValue (&&others)[count]) {
  std::vector<c10::IValue> values;
  values.reserve(count + kCommon.size());
  std::move(std::begin(others), std::end(others), std::back_inserter(values));
  values.emplace_back(options.alibi_slopes);
  values.emplace_back(options.scale);
  values.emplace_back(options.dropout_p);
  values.emplace_back(options.window_left);
  values.emplace_back(options.window_right);
  return operator_(std::move(values));
}

std::tuple<Tensor, Tensor> first_two(const torch::jit::Stack& results) {
  return {results[0].toTensor(), results[1].toTensor()};
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
  static const auto forward = named_call(
      "foo::attention_seeded", {"query", "key", "value", "attn_bias", "seed", "is_causal"});
  return first_two(
      call(forward, options, {query, key, value, defined_or_none(mask), seed, options.is_causal}));
}

AttentionGradients attention_backward(const Tensor& grad_output, const Tensor& query,
                                      const Tensor& key, const Tensor& value,
                                      const OptionalTensor& mask, const Tensor& output,
                                      const Tensor& logsumexp, const OptionalTensor& seed,
                                      bool mask_requires_grad, const AttentionOptions& options) {
  static const auto backward =
      named_call("foo::attention_backward",
                 {"grad_output", "grad_logsumexp", "query", "key", "value", "attn_bias", "output",
                  "logsumexp", "seed", "attn_bias_requires_grad", "is_causal"});
  const auto gradients =
      call(backward, options,
           {grad_output, at::zeros_like(logsumexp), query, key, value, defined_or_none(mask),
            output, logsumexp, seed, mask_requires_grad, options.is_causal});
  return {gradients[0].toTensor(), gradients[1].toTensor(), gradients[2].toTensor(),
          mask_requires_grad ? gradients[3].toTensor() : Tensor()};
}

std::tuple<Tensor, Tensor> attention_varlen(const Tensor& query, const Tensor& key,
                                            const Tensor& value, const PackedSequences& sequences,
                                            const OptionalTensor& seed,
                                            const AttentionOptions& options) {
  static const auto forward =
      named_call("foo::attention_varlen_seeded",
                 {"query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
                  "block_table", "seed", "max_seqlen_q", "max_seqlen_k"});
  return first_two(
      call(forward, options,
           {query, key, value, sequences.starts_q, sequences.starts_k, sequences.used_k,
            sequences.block_table, seed, sequences.longest_q, sequences.longest_k}));
}

AttentionGradients attention_varlen_backward(const Tensor& grad_output, const Tensor& query,
                                             const Tensor& key, const Tensor& value,
                                             const PackedSequences& sequences, const Tensor& output,
                                             const Tensor& logsumexp, const OptionalTensor& seed,
                                             const AttentionOptions& options) {
  static const auto backward = named_call(
      "foo::attention_varlen_backward",
      {"grad_output", "grad_logsumexp", "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k",
       "seqused_k", "block_table", "output", "logsumexp", "seed", "max_seqlen_q", "max_seqlen_k"});
  const auto gradients =
      call(backward, options,
           {grad_output, at::zeros_like(logsumexp), query, key, value, sequences.starts_q,
            sequences.starts_k, sequences.used_k, sequences.block_table, output, logsumexp, seed,
            sequences.longest_q, sequences.longest_k});
  return {gradients[0].toTensor(), gradients[1].toTensor(), gradients[2].toTensor(), Tensor()};
}

}  // namespace foo::aten
