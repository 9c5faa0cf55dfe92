#include "ops/attention/varlen.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "launch/registration.h"
#include "ops/attention/arguments.h"
#include "ops/attention/passes.h"

namespace foo {

namespace {

// Views (pages, page size, heads, dim) as (pages, heads, page size, dim).
Operand paged(const at::Tensor& tensor) {
  return Operand(tensor.transpose(1, 2));
}

void check_offsets(const char* name, const char* argument, const int32_t* offsets, int64_t count) {
  TORCH_CHECK_VALUE(offsets[0] == 0, name, ": ", argument, " must start at 0, got ", offsets[0]);
  for (int64_t i = 1; i < count; ++i) {
    TORCH_CHECK_VALUE(offsets[i] >= offsets[i - 1], name, ": ", argument,
                      " must not decrease, got ", offsets[i], " after ", offsets[i - 1]);
  }
}

void check_end(const char* name, const char* argument, const char* tensor, int64_t end,
               int64_t length) {
  TORCH_CHECK_VALUE(end == length, name, ": ", argument, " must end at ", length,
                    ", the length of ", tensor, ", got ", end);
}

void check_used(const char* name, const Lengths& lengths, const int32_t* used, bool is_paged,
                int64_t page_room) {
  for (size_t i = 0; i < lengths.key_lengths.size(); ++i) {
    const int64_t room = is_paged ? page_room : lengths.key_lengths[i];
    TORCH_CHECK_VALUE(used[i] >= 0 && used[i] <= room, name, ": seqused_k must be from 0", " to ",
                      room, " for sequence ", i, ", got ", used[i]);
  }
}

// Copies only the blocks in use, since the table may be large.
void read_pages(const char* name, Lengths& lengths, const at::Tensor& table, int64_t page_size,
                int64_t pages) {
  const int64_t room = table.size(1) * page_size;
  for (size_t i = 0; i < lengths.key_lengths.size(); ++i) {
    const int64_t length = lengths.key_lengths[i];
    TORCH_CHECK_VALUE(length <= room, name, ": cu_seqlens_k must give sequence ", i, " at most ",
                      room, " keys, as many as block_table holds, got ", length);
    lengths.columns = std::max(lengths.columns, ceil_divide(length, page_size));
  }
  lengths.pages.resize(lengths.key_lengths.size() * lengths.columns);
  const auto* const numbers = table.const_data_ptr<int32_t>();
  for (size_t i = 0; i < lengths.key_lengths.size(); ++i) {
    const auto* const row = numbers + static_cast<int64_t>(i) * table.stride(0);
    int32_t* const own = lengths.pages.data() + static_cast<int64_t>(i) * lengths.columns;
    for (int64_t page = 0; page < ceil_divide(lengths.key_lengths[i], page_size); ++page) {
      const int32_t number = __atomic_load_n(row + page * table.stride(1), __ATOMIC_RELAXED);
      TORCH_CHECK_VALUE(number >= 0 && number < pages, name,
                        ": block_table must have block numbers from 0 to ", pages - 1, ", got ",
                        number, " for sequence ", i);
      own[page] = number;
    }
  }
}

void check_longest(const char* name, const char* argument, const std::vector<int64_t>& lengths,
                   int64_t given) {
  int64_t longest = 0;
  for (const int64_t length : lengths) {
    longest = std::max(longest, length);
  }
  TORCH_CHECK_VALUE(given >= longest, name, ": ", argument, " must be at least ", longest,
                    ", the length of the longest sequence, got ", given);
}

}  // namespace

Lengths lengths_of(const char* name, const AttentionInputs& inputs,
                   const AttentionOptions& options) {
  // Also called before an operator on the device runs.
  const DeviceAccess access;
  const int64_t count = inputs.cu_seqlens_q.numel();
  const bool is_paged = inputs.block_table.has_value();
  const at::Tensor query_starts = read_once(inputs.cu_seqlens_q);
  const at::Tensor key_starts = read_once(inputs.cu_seqlens_k);
  const auto* query_offsets = query_starts.const_data_ptr<int32_t>();
  const auto* key_offsets = key_starts.const_data_ptr<int32_t>();
  check_offsets(name, "cu_seqlens_q", query_offsets, count);
  check_end(name, "cu_seqlens_q", "query", query_offsets[count - 1], inputs.query.size(0));
  check_offsets(name, "cu_seqlens_k", key_offsets, count);
  if (!is_paged) {
    check_end(name, "cu_seqlens_k", "key", key_offsets[count - 1], inputs.key.size(0));
  }
  Lengths lengths;
  for (int64_t i = 0; i + 1 < count; ++i) {
    lengths.query_offsets.push_back(query_offsets[i]);
    lengths.query_lengths.push_back(query_offsets[i + 1] - query_offsets[i]);
    lengths.key_offsets.push_back(is_paged ? 0 : key_offsets[i]);
    lengths.key_lengths.push_back(key_offsets[i + 1] - key_offsets[i]);
  }
  const int64_t page_size = is_paged ? inputs.key.size(1) : 0;
  if (inputs.seqused_k.has_value()) {
    const at::Tensor used = read_once(*inputs.seqused_k);
    const auto* values = used.const_data_ptr<int32_t>();
    check_used(name, lengths, values, is_paged,
               is_paged ? inputs.block_table->size(1) * page_size : 0);
    lengths.key_lengths.assign(values, values + count - 1);
  }
  if (is_paged) {
    read_pages(name, lengths, *inputs.block_table, page_size, inputs.key.size(0));
  }
  check_longest(name, "max_seqlen_q", lengths.query_lengths, options.max_seqlen_q.expect_int());
  check_longest(name, "max_seqlen_k", lengths.key_lengths, options.max_seqlen_k.expect_int());
  return lengths;
}

Operand packed(const at::Tensor& tensor) {
  Operand operand(tensor.transpose(0, 1).unsqueeze(0));
  operand.strides[0] = 0;
  return operand;
}

Operand packed_rows(const at::Tensor& tensor) {
  Operand operand(tensor.unsqueeze(0));
  operand.strides[0] = 0;
  return operand;
}

PackedCall::PackedCall(const AttentionInputs& inputs, const Lengths& lengths,
                       const AttentionOptions& options, const std::optional<at::Tensor>& seed) {
  const bool is_paged = inputs.block_table.has_value();
  if (is_paged) {
    parameters.block_table = lengths.pages.data();
    parameters.block_table_stride = lengths.columns;
    parameters.page_size = inputs.key.size(1);
  }
  parameters.batch = static_cast<int64_t>(lengths.query_lengths.size());
  parameters.query_heads = inputs.query.size(1);
  parameters.key_heads = inputs.key.size(is_paged ? 2 : 1);
  parameters.group = parameters.key_heads == 0 ? 1 : parameters.query_heads / parameters.key_heads;
  parameters.head_dim = inputs.query.size(2);
  parameters.value_dim = inputs.value.size(-1);
  parameters.query = packed(inputs.query);
  parameters.key = is_paged ? paged(inputs.key) : packed(inputs.key);
  parameters.value = is_paged ? paged(inputs.value) : packed(inputs.value);
  set_options(parameters, extras, inputs, options, seed);
  for (int64_t i = 0; i < parameters.batch; ++i) {
    parameters.query_length = std::max(parameters.query_length, lengths.query_lengths[i]);
    parameters.key_length = std::max(parameters.key_length, lengths.key_lengths[i]);
    sequences.push_back({i, lengths.query_offsets[i], lengths.query_lengths[i],
                         lengths.key_offsets[i], lengths.key_lengths[i]});
  }
}

UsedBlocks::UsedBlocks(Lengths& lengths, const at::Tensor& key) {
  const int64_t page_size = key.size(1);
  std::vector<int64_t> numbers, distinct, places;
  std::unordered_map<int64_t, int64_t> place_of;
  for (size_t i = 0; i < lengths.key_lengths.size(); ++i) {
    lengths.key_offsets[i] = static_cast<int64_t>(numbers.size()) * page_size;
    const int32_t* const row = lengths.pages.data() + static_cast<int64_t>(i) * lengths.columns;
    for (int64_t page = 0; page < ceil_divide(lengths.key_lengths[i], page_size); ++page) {
      const auto [place, is_new] = place_of.try_emplace(row[page], distinct.size());
      if (is_new) {
        distinct.push_back(row[page]);
      }
      numbers.push_back(row[page]);
      places.push_back(place->second);
    }
  }
  const auto options = key.options().dtype(at::kLong);
  numbers_ = at::tensor(numbers, options);
  distinct_ = at::tensor(distinct, options);
  places_ = at::tensor(places, options);
}

at::Tensor UsedBlocks::gather(const at::Tensor& pages, at::ScalarType type) const {
  return pages.index_select(0, numbers_).flatten(0, 1).to(type);
}

at::Tensor UsedBlocks::scatter(const at::Tensor& gradient, const at::Tensor& pages) const {
  auto sizes = pages.sizes().vec();
  sizes[0] = places_.size(0);
  const at::Tensor blocks = gradient.view(sizes);
  sizes[0] = distinct_.size(0);
  const at::Tensor sums = at::zeros(sizes, gradient.options()).index_add_(0, places_, blocks);
  return at::zeros(pages.sizes(), pages.options())
      .index_copy_(0, distinct_, sums.to(pages.scalar_type()));
}

namespace {

using Outputs = std::tuple<at::Tensor, at::Tensor>;

// foo::attention_varlen and foo::attention_varlen_seeded.
Outputs attention_varlen(const AttentionArguments& arguments) {
  check_attention(arguments);
  const auto& inputs = arguments.inputs();
  const auto& options = arguments.options();
  const auto lengths = lengths_of("attention_varlen", inputs, options);
  const auto& query = inputs.query;
  PackedCall call(inputs, lengths, options, seed_of(arguments, options));
  const at::Tensor output =
      new_tensor({query.size(0), query.size(1), inputs.value.size(-1)}, query.options());
  const at::Tensor logsumexp =
      at::empty({query.size(1), query.size(0)}, query.options().dtype(compute_type(query)));
  call.parameters.output = packed(output);
  call.parameters.logsumexp = packed_rows(logsumexp);
  run_forward(call.parameters, query, call.sequences, options);
  return {output, logsumexp};
}

// Gradients for query, key, value, alibi_slopes and sinks; of size 0 if not given.
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
      run_backward(parameters, inputs, call.sequences, options, true);
  return {grad_query, grad_key, grad_value, grad_alibi_slopes, grad_sinks};
}

// Sums in the compute type, so that no term is rounded.
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
  // A missing tensor has a gradient of size 0, in query's dtype.
  const auto own_type = [&](const at::Tensor& gradient, const std::optional<at::Tensor>& tensor) {
    return gradient.to(tensor.value_or(inputs.query).scalar_type());
  };
  return {own_type(grad_query, inputs.query), blocks.scatter(grad_key, inputs.key),
          blocks.scatter(grad_value, inputs.value),
          own_type(grad_alibi_slopes, inputs.alibi_slopes), own_type(grad_sinks, inputs.sinks)};
}

PackedGradients attention_varlen_backward(const AttentionArguments& arguments) {
  check_attention(arguments);
  const auto& inputs = arguments.inputs();
  const auto& options = arguments.options();
  const auto backward = inputs.block_table.has_value() ? &paged_backward : &packed_backward;
  return backward(inputs, lengths_of("attention_varlen", inputs, options), options,
                  arguments.results(), arguments.seed());
}

}  // namespace

void check_attention_sequences(const AttentionInputs& inputs, const AttentionOptions& options) {
  lengths_of("attention_varlen", inputs, options);
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_boxed_kernel<"foo::attention_varlen", &attention_varlen>(library);
  register_boxed_kernel<"foo::attention_varlen_seeded", &attention_varlen>(library);
  register_boxed_kernel<"foo::attention_varlen_backward", &attention_varlen_backward>(library);
}

}  // namespace foo
