#include <ATen/ops/empty.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "launch/registration.h"
#include "launch/symbols.h"
#include "ops/attention/arguments.h"
#include "ops/attention/dense.h"
#include "ops/attention/passes.h"
#include "ops/attention/programs.h"
#include "ops/attention/varlen.h"

namespace foo {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kFlexName = "flex_attention";

void check_list(const char* argument, const OptionalTensor& tensor, int64_t dimensions,
                const Tensor& query) {
  if (!tensor.has_value()) return;
  TORCH_CHECK_TYPE(tensor->scalar_type() == at::kInt, kFlexName, ": ", argument,
                   " must be int32, got ", dtype_name(tensor->scalar_type()));
  TORCH_CHECK_VALUE(tensor->device() == query.device(), kFlexName, ": ", argument, " must be on ",
                    query.device(), " as query is, got ", tensor->device());
  TORCH_CHECK_VALUE(tensor->dim() == dimensions, kFlexName, ": ", argument, " must have ",
                    dimensions, " dimensions, got ", tensor->dim());
}

// Checks the counts and the indices of partial blocks, or of full blocks.
void check_lists(const char* counts_name, const OptionalTensor& counts, const char* indices_name,
                 const OptionalTensor& indices, const Tensor& query,
                 const c10::SymInt& query_block) {
  check_list(counts_name, counts, 3, query);
  check_list(indices_name, indices, 4, query);
  TORCH_CHECK_VALUE(counts.has_value() == indices.has_value(), kFlexName, ": ", counts_name,
                    " and ", indices_name, " must be given together, got one of them");
  if (!counts.has_value()) return;
  const auto sizes = counts->sym_sizes();
  for (const auto& [axis, name] : {std::pair(0, "rows of the batch"), {1, "heads"}}) {
    TORCH_CHECK_VALUE(holds(sizes[axis].sym_eq(1).sym_or(sizes[axis].sym_eq(query.sym_size(axis)))),
                      kFlexName, ": ", counts_name, " must have 1 or ", query.sym_size(axis), " ",
                      name, " as query has, got ", sizes[axis]);
  }
  TORCH_CHECK_VALUE(holds((sizes[2] * query_block).sym_ge(query.sym_size(2))), kFlexName, ": ",
                    counts_name, " must have a row for each block of ", query_block, " of the ",
                    query.sym_size(2), " queries, got ", sizes[2]);
  TORCH_CHECK_VALUE(have_sizes(indices->sym_sizes().slice(0, 3), sizes), kFlexName, ": ",
                    indices_name, " must have the leading dimensions ", sizes, " as ", counts_name,
                    " has, got ", indices->sym_sizes());
}

using Outputs = std::tuple<Tensor, Tensor>;

Outputs flex_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                       at::TensorList captured, const OptionalTensor& kv_num_blocks,
                       const OptionalTensor& kv_indices, const OptionalTensor& full_kv_num_blocks,
                       const OptionalTensor& full_kv_indices, std::string_view score_mod,
                       std::string_view mask_mod, std::string_view backward,
                       c10::ArrayRef<double> numbers, c10::IntArrayRef integers,
                       std::optional<double> scale, int64_t query_block, int64_t key_block) {
  check_flex_attention(query, key, value, captured.vec(), kv_num_blocks, kv_indices,
                       full_kv_num_blocks, full_kv_indices, query_block, key_block);
  const AttentionInputs inputs{
      .query = query, .key = key, .value = value, .alibi_slopes = kNotGiven, .sinks = kNotGiven};
  const AttentionOptions options{.scale = scale};
  const Tensor output = make_output(query, value.size(3));
  const Tensor logsumexp = make_logsumexp(query);
  Extras extras;
  auto parameters = make_parameters(inputs);
  set_options(parameters, extras, inputs, options, std::nullopt);
  parameters.output = Operand(output);
  parameters.logsumexp = Operand(logsumexp);
  const Programs programs{score_mod, mask_mod, {}, captured, numbers, integers};
  const auto sequences = sequences_of(parameters);
  const ProgramCall call(
      parameters, sequences, programs,
      {kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, query_block, key_block},
      compute_type(query));
  run_forward(parameters, query, sequences, options);
  call.check_indices(kFlexName);
  return {output, logsumexp};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>>;

Gradients flex_attention_backward(
    const Tensor& grad_output, const Tensor& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, at::TensorList captured, const Tensor& output, const Tensor& logsumexp,
    const OptionalTensor& kv_num_blocks, const OptionalTensor& kv_indices,
    const OptionalTensor& full_kv_num_blocks, const OptionalTensor& full_kv_indices,
    const c10::List<bool>& requires_grad, std::string_view score_mod, std::string_view mask_mod,
    std::string_view backward, c10::ArrayRef<double> numbers, c10::IntArrayRef integers,
    std::optional<double> scale, int64_t query_block, int64_t key_block) {
  check_flex_attention(query, key, value, captured.vec(), kv_num_blocks, kv_indices,
                       full_kv_num_blocks, full_kv_indices, query_block, key_block);
  check_attention_results("flex_attention_backward", grad_output, grad_logsumexp, query, value,
                          output, logsumexp);
  check_captured_requirements("flex_attention_backward", captured.vec(), requires_grad.vec());
  const AttentionInputs inputs{
      .query = query, .key = key, .value = value, .alibi_slopes = kNotGiven, .sinks = kNotGiven};
  const AttentionOptions options{.scale = scale};
  Extras extras;
  auto parameters = make_parameters(inputs);
  set_options(parameters, extras, inputs, options, std::nullopt);
  parameters.output = Operand(output);
  parameters.logsumexp = Operand(logsumexp);
  parameters.grad_output = Operand(grad_output);
  parameters.grad_logsumexp = Operand(grad_logsumexp);
  const Programs programs{score_mod, mask_mod, backward, captured, numbers, integers};
  const auto sequences = sequences_of(parameters);
  ProgramCall call(
      parameters, sequences, programs,
      {kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, query_block, key_block},
      compute_type(query), requires_grad.vec());
  auto [grad_query, grad_key, grad_value, none, no_slopes, no_sinks] =
      run_backward(parameters, inputs, sequences, options, false, &call);
  call.check_indices("flex_attention_backward");
  return {grad_query, grad_key, grad_value, call.gradients()};
}

}  // namespace

void check_flex_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const std::vector<Tensor>& captured, const OptionalTensor& kv_num_blocks,
                          const OptionalTensor& kv_indices,
                          const OptionalTensor& full_kv_num_blocks,
                          const OptionalTensor& full_kv_indices, const c10::SymInt& query_block,
                          const c10::SymInt& key_block) {
  check_dense(
      kFlexName,
      {.query = query, .key = key, .value = value, .alibi_slopes = kNotGiven, .sinks = kNotGiven});
  check_captured(kFlexName, captured, query);
  TORCH_CHECK_VALUE(holds(query_block.sym_ge(1)), kFlexName,
                    ": query_block must be at least 1, got ", query_block);
  TORCH_CHECK_VALUE(holds(key_block.sym_ge(1)), kFlexName, ": key_block must be at least 1, got ",
                    key_block);
  check_lists("kv_num_blocks", kv_num_blocks, "kv_indices", kv_indices, query, query_block);
  check_lists("full_kv_num_blocks", full_kv_num_blocks, "full_kv_indices", full_kv_indices, query,
              query_block);
  TORCH_CHECK_VALUE(kv_num_blocks.has_value() || !full_kv_num_blocks.has_value(), kFlexName,
                    ": kv_num_blocks must be given if full_kv_num_blocks is given, got None");
  TORCH_CHECK_VALUE(!full_kv_num_blocks.has_value() ||
                        have_sizes(full_kv_num_blocks->sym_sizes(), kv_num_blocks->sym_sizes()),
                    kFlexName, ": full_kv_num_blocks must have shape ", kv_num_blocks->sym_sizes(),
                    " as kv_num_blocks has, got ", full_kv_num_blocks->sym_sizes());
}

void check_captured(const char* name, const std::vector<Tensor>& captured, const Tensor& query) {
  for (size_t i = 0; i < captured.size(); ++i) {
    const Tensor& tensor = captured[i];
    TORCH_CHECK_VALUE(tensor.dim() <= CapturedTensor::kMostDimensions, name, ": captured tensor ",
                      i, " must have at most ", CapturedTensor::kMostDimensions,
                      " dimensions, got ", tensor.dim());
    TORCH_CHECK_VALUE(tensor.device() == query.device(), name, ": captured tensor ", i,
                      " must be on ", query.device(), " as query is, got ", tensor.device());
    TORCH_CHECK_VALUE(holds(tensor.sym_numel().sym_gt(0)), name, ": captured tensor ", i,
                      " must have elements, got shape ", tensor.sym_sizes());
  }
}

void check_captured_requirements(const char* name, const std::vector<Tensor>& captured,
                                 const std::vector<bool>& requires_grad) {
  TORCH_CHECK_VALUE(requires_grad.size() == captured.size(), name,
                    ": captured_requires_grad must have ", captured.size(),
                    " elements as captured has, got ", requires_grad.size());
  for (size_t i = 0; i < captured.size(); ++i) {
    TORCH_CHECK_TYPE(!requires_grad[i] || captured[i].is_floating_point(), name,
                     ": captured tensor ", i, " must be floating-point to have a gradient, got ",
                     dtype_name(captured[i].scalar_type()));
  }
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_shared_kernel<"foo::flex_attention", &flex_attention>(library);
  register_shared_kernel<"foo::flex_attention_backward", &flex_attention_backward>(library);
}

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>>;

constexpr const char* kFlexVarlenName = "flex_attention_varlen";
constexpr const char* kBackwardName = "flex_attention_varlen_backward";
// Packed sequences have no block mask: the keys that a mask_mod hides are found for each sequence.
const BlockMask kNoMask{kNotGiven, kNotGiven, kNotGiven, kNotGiven, 1, 1};

// The result refers to the tensors.
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
      run_backward(call.parameters, inputs, call.sequences, options, true, &mods);
  mods.check_indices(kBackwardName);
  return {grad_query, grad_key, grad_value, mods.gradients()};
}

// Sums over sequences that share a block are in the compute type, so that no term is rounded.
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
