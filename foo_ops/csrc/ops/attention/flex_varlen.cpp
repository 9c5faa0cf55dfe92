#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/huge_pages.h"
#include "launch/operator_counts.h"
#include "ops/attention/backward.h"
#include "ops/attention/checks.h"
#include "ops/attention/flex.h"
#include "ops/attention/packed.h"
#include "ops/attention/programs.h"
#include "ops/attention/run.h"

namespace foo {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>>;

constexpr const char* kFlexVarlenName = "flex_attention_varlen";
constexpr const char* kBackwardName = "flex_attention_varlen_backward";
// Packed sequences have no mask of blocks: what a mask_mod hides is found for each of them.
const BlockMask kNoMask{kNotGiven, kNotGiven, kNotGiven, kNotGiven, 1, 1};

// They refer to the tensors.
AttentionInputs inputs_of(const Tensor& query, const Tensor& key, const Tensor& value,
                          const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                          const OptionalTensor& seqused_k, const OptionalTensor& block_table) {
  return {.query = query,
          .key = key,
          .value = value,
          .alibi_slopes = kNotGiven,
          .sinks = kNotGiven,
          .cu_seqlens_q = cu_seqlens_q,
          .cu_seqlens_k = cu_seqlens_k,
          .seqused_k = seqused_k,
          .block_table = block_table};
}

Outputs attend(const AttentionInputs& inputs, const AttentionOptions& options,
               const Programs& programs) {
  const Tensor& query = inputs.query;
  const Lengths lengths = lengths_of(kFlexVarlenName, inputs, options);
  PackedCall call(inputs, lengths, options, std::nullopt);
  const Tensor output =
      new_tensor({query.size(0), query.size(1), inputs.value.size(-1)}, query.options());
  const Tensor logsumexp =
      at::empty({query.size(1), query.size(0)}, query.options().dtype(compute_type(query)));
  call.parameters.output = packed(output);
  call.parameters.logsumexp = packed_rows(logsumexp);
  const ProgramCall mods(call.parameters, call.sequences, programs, kNoMask, compute_type(query));
  run_forward(call.parameters, query, call.sequences, options);
  mods.check_indices(kFlexVarlenName);
  return {output, logsumexp};
}

Gradients differentiate(const AttentionInputs& inputs, const Lengths& lengths,
                        const AttentionOptions& options, const AttentionResults& results,
                        const Programs& programs, const std::vector<bool>& requires_grad) {
  PackedCall call(inputs, lengths, options, std::nullopt);
  call.parameters.output = packed(results.output);
  call.parameters.logsumexp = packed_rows(results.logsumexp);
  call.parameters.grad_output = packed(results.grad_output);
  call.parameters.grad_logsumexp = packed_rows(results.grad_logsumexp);
  ProgramCall mods(call.parameters, call.sequences, programs, kNoMask, compute_type(inputs.query),
                   requires_grad);
  auto [grad_query, grad_key, grad_value, none, no_slopes, no_sinks] =
      run_backward(call.parameters, inputs, call.sequences, options, false, true, &mods);
  mods.check_indices(kBackwardName);
  return {grad_query, grad_key, grad_value, mods.gradients()};
}

// Sums over the sequences that share a block are in the compute type, so that nothing is rounded
// before them.
Gradients differentiate_pages(const AttentionInputs& inputs, const Lengths& given,
                              const AttentionOptions& options, const AttentionResults& results,
                              const Programs& programs, const std::vector<bool>& requires_grad) {
  const auto type = compute_type(inputs.query);
  Lengths lengths = given;
  const UsedBlocks blocks(lengths, inputs.key);
  const Tensor query = inputs.query.to(type);
  const Tensor key = blocks.gather(inputs.key, type), value = blocks.gather(inputs.value, type);
  const Tensor grad_output = results.grad_output.to(type), output = results.output.to(type);
  const AttentionInputs gathered = inputs_of(query, key, value, inputs.cu_seqlens_q,
                                             inputs.cu_seqlens_k, inputs.seqused_k, kNotGiven);
  auto [grad_query, grad_key, grad_value, grad_captured] = differentiate(
      gathered, lengths, options, {grad_output, results.grad_logsumexp, output, results.logsumexp},
      programs, requires_grad);
  return {grad_query.to(inputs.query.scalar_type()), blocks.scatter(grad_key, inputs.key),
          blocks.scatter(grad_value, inputs.value), std::move(grad_captured)};
}

Outputs flex_attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value,
                              at::TensorList captured, const Tensor& cu_seqlens_q,
                              const Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                              const OptionalTensor& block_table, c10::SymInt max_seqlen_q,
                              c10::SymInt max_seqlen_k, std::string_view score_mod,
                              std::string_view mask_mod, std::string_view backward,
                              c10::ArrayRef<double> numbers, c10::IntArrayRef integers,
                              std::optional<double> scale) {
  const AttentionInputs inputs =
      inputs_of(query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table);
  check_flex_attention_varlen(query, key, value, captured.vec(), cu_seqlens_q, cu_seqlens_k,
                              seqused_k, block_table);
  return attend(inputs,
                {.scale = scale, .max_seqlen_q = max_seqlen_q, .max_seqlen_k = max_seqlen_k},
                {score_mod, mask_mod, {}, captured, numbers, integers});
}

Gradients flex_attention_varlen_backward(
    const Tensor& grad_output, const Tensor& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, at::TensorList captured, const Tensor& output, const Tensor& logsumexp,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
    const OptionalTensor& block_table, const c10::List<bool>& requires_grad,
    c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k, std::string_view score_mod,
    std::string_view mask_mod, std::string_view backward, c10::ArrayRef<double> numbers,
    c10::IntArrayRef integers, std::optional<double> scale) {
  const AttentionInputs inputs =
      inputs_of(query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table);
  const AttentionOptions options{
      .scale = scale, .max_seqlen_q = max_seqlen_q, .max_seqlen_k = max_seqlen_k};
  check_packed(kBackwardName, inputs);
  check_captured(kBackwardName, captured.vec(), query);
  check_attention_results(kBackwardName, grad_output, grad_logsumexp, query, value, output,
                          logsumexp);
  check_captured_requirements(kBackwardName, captured.vec(), requires_grad.vec());
  const auto compute = block_table.has_value() ? &differentiate_pages : &differentiate;
  return compute(inputs, lengths_of(kBackwardName, inputs, options), options,
                 {grad_output, grad_logsumexp, output, logsumexp},
                 {score_mod, mask_mod, backward, captured, numbers, integers}, requires_grad.vec());
}

}  // namespace

void check_flex_attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value,
                                 const std::vector<Tensor>& captured, const Tensor& cu_seqlens_q,
                                 const Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                                 const OptionalTensor& block_table) {
  check_packed(kFlexVarlenName,
               inputs_of(query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table));
  check_captured(kFlexVarlenName, captured, query);
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_shared_kernel<"foo::flex_attention_varlen", &flex_attention_varlen>(library);
  register_shared_kernel<"foo::flex_attention_varlen_backward", &flex_attention_varlen_backward>(
      library);
}

}  // namespace foo
