#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "launch/huge_pages.h"
#include "launch/kernel_table.h"
#include "launch/operator_counts.h"
#include "ops/attention/backward.h"
#include "ops/attention/checks.h"
#include "ops/attention/packed.h"
#include "ops/attention/run.h"

namespace foo {

namespace {

using Outputs = std::tuple<at::Tensor, at::Tensor>;

Outputs attend(const AttentionInputs& inputs, const Lengths& lengths,
               const AttentionOptions& options, const std::optional<at::Tensor>& seed) {
  const auto& query = inputs.query;
  PackedCall call(inputs, lengths, options, seed);
  const at::Tensor output =
      new_tensor({query.size(0), query.size(1), inputs.value.size(-1)}, query.options());
  const at::Tensor logsumexp =
      at::empty({query.size(1), query.size(0)}, query.options().dtype(compute_type(query)));
  call.parameters.output = packed(output);
  call.parameters.logsumexp = packed_rows(logsumexp);
  run_forward(call.parameters, query, call.sequences, options);
  return {output, logsumexp};
}

// The dispatcher hands arguments over as they are: this is called for every layer of a model.
Outputs attention_varlen(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                         const std::optional<at::Tensor>& seqused_k,
                         const std::optional<at::Tensor>& block_table,
                         const std::optional<at::Tensor>& alibi_slopes,
                         const std::optional<at::Tensor>& sinks, c10::SymInt max_seqlen_q,
                         c10::SymInt max_seqlen_k, std::optional<double> scale, double dropout_p,
                         c10::SymInt window_left, c10::SymInt window_right, double softcap) {
  const AttentionInputs inputs{.query = query,
                               .key = key,
                               .value = value,
                               .alibi_slopes = alibi_slopes,
                               .sinks = sinks,
                               .cu_seqlens_q = cu_seqlens_q,
                               .cu_seqlens_k = cu_seqlens_k,
                               .seqused_k = seqused_k,
                               .block_table = block_table};
  const AttentionOptions options{false,        scale,   dropout_p,    window_left,
                                 window_right, softcap, max_seqlen_q, max_seqlen_k};
  check_attention_varlen(inputs, options);
  const auto lengths = lengths_of("attention_varlen", inputs, options);
  return attend(inputs, lengths, options, draw_seed(query, dropout_p));
}

Outputs attention_varlen_seeded(const AttentionArguments& arguments) {
  const auto inputs = arguments.inputs();
  const auto options = arguments.options();
  check_attention_varlen(inputs, options);
  check_attention_seed("attention_varlen", inputs.query, arguments.seed(), options.dropout_p);
  check_attention_dropout_heads("attention_varlen", inputs.query, inputs.dropout_heads,
                                inputs.cu_seqlens_q.size(0) - 1);
  return attend(inputs, lengths_of("attention_varlen", inputs, options), options, arguments.seed());
}

// The gradients for query, key, value, alibi_slopes and sinks; of size 0 for what was not given.
using PackedGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

PackedGradients packed_backward(const AttentionInputs& inputs, const Lengths& lengths,
                                const AttentionOptions& options, const AttentionResults& results,
                                const std::optional<at::Tensor>& seed) {
  PackedCall call(inputs, lengths, options, seed);
  auto& parameters = call.parameters;
  parameters.output = packed(results.output);
  parameters.logsumexp = packed_rows(results.logsumexp);
  parameters.grad_output = packed(results.grad_output);
  parameters.grad_logsumexp = packed_rows(results.grad_logsumexp);
  auto [grad_query, grad_key, grad_value, grad_attn_bias, grad_alibi_slopes, grad_sinks] =
      run_backward(parameters, inputs, call.sequences, options, false, true);
  return {grad_query, grad_key, grad_value, grad_alibi_slopes, grad_sinks};
}

// The sum is in the compute type, so that nothing is rounded before it.
PackedGradients paged_backward(const AttentionInputs& inputs, const Lengths& given,
                               const AttentionOptions& options, const AttentionResults& results,
                               const std::optional<at::Tensor>& seed) {
  const auto type = compute_type(inputs.query);
  Lengths lengths = given;
  const UsedBlocks blocks(lengths, inputs.key);
  const at::Tensor query = inputs.query.to(type);
  const at::Tensor key = blocks.gather(inputs.key, type);
  const at::Tensor value = blocks.gather(inputs.value, type);
  const at::Tensor grad_output = results.grad_output.to(type);
  const at::Tensor output = results.output.to(type);
  const AttentionInputs gathered{.query = query,
                                 .key = key,
                                 .value = value,
                                 .alibi_slopes = inputs.alibi_slopes,
                                 .sinks = inputs.sinks,
                                 .cu_seqlens_q = inputs.cu_seqlens_q,
                                 .cu_seqlens_k = inputs.cu_seqlens_k,
                                 .seqused_k = inputs.seqused_k,
                                 .dropout_heads = inputs.dropout_heads};
  auto [grad_query, grad_key, grad_value, grad_alibi_slopes, grad_sinks] =
      packed_backward(gathered, lengths, options,
                      {grad_output, results.grad_logsumexp, output, results.logsumexp}, seed);
  // A tensor that was not given has a gradient of size 0, in query's dtype.
  const auto own_type = [&](const at::Tensor& gradient, const std::optional<at::Tensor>& tensor) {
    return gradient.to(tensor.value_or(inputs.query).scalar_type());
  };
  return {own_type(grad_query, inputs.query), blocks.scatter(grad_key, inputs.key),
          blocks.scatter(grad_value, inputs.value),
          own_type(grad_alibi_slopes, inputs.alibi_slopes), own_type(grad_sinks, inputs.sinks)};
}

PackedGradients attention_varlen_backward(const AttentionArguments& arguments) {
  const auto inputs = arguments.inputs();
  const auto options = arguments.options();
  const auto results = arguments.results();
  check_attention_varlen(inputs, options);
  check_attention_results("attention_varlen_backward", results.grad_output, results.grad_logsumexp,
                          inputs.query, inputs.value, results.output, results.logsumexp);
  check_attention_seed("attention_varlen_backward", inputs.query, arguments.seed(),
                       options.dropout_p);
  check_attention_dropout_heads("attention_varlen_backward", inputs.query, inputs.dropout_heads,
                                inputs.cu_seqlens_q.size(0) - 1);
  const auto backward = inputs.block_table.has_value() ? &paged_backward : &packed_backward;
  return backward(inputs, lengths_of("attention_varlen", inputs, options), options, results,
                  arguments.seed());
}

}  // namespace

void check_attention_sequences(const AttentionInputs& inputs, const AttentionOptions& options) {
  lengths_of("attention_varlen", inputs, options);
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_shared_kernel<"foo::attention_varlen", &attention_varlen>(library);
  register_boxed_kernel<"foo::attention_varlen_seeded", &attention_varlen_seeded>(library);
  register_boxed_kernel<"foo::attention_varlen_part", &attention_varlen_seeded>(library);
  register_boxed_kernel<"foo::attention_varlen_backward", &attention_varlen_backward>(library);
  register_boxed_kernel<"foo::attention_varlen_part_backward", &attention_varlen_backward>(library);
}

}  // namespace foo
