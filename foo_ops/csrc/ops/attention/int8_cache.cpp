#include <ATen/ops/empty.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "launch/registration.h"
#include "launch/symbols.h"
#include "ops/attention/arguments.h"
#include "ops/attention/passes.h"

namespace foo {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kInt8CacheName = "attention_int8_cache";

void check_tensor(const char* argument, const Tensor& tensor, at::ScalarType dtype,
                  c10::SymIntArrayRef sizes, const char* shape, const Tensor& query) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, kInt8CacheName, ": ", argument, " must be ",
                   dtype_name(dtype), ", got ", dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(have_sizes(tensor.sym_sizes(), sizes), kInt8CacheName, ": ", argument,
                    " must have shape ", shape, " = ", sizes, ", got ", tensor.sym_sizes());
  TORCH_CHECK_VALUE(tensor.device() == query.device(), kInt8CacheName, ": ", argument,
                    " must be on ", query.device(), " as query is, got ", tensor.device());
}

void check_query(const Tensor& query) {
  const auto dtype = query.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      kInt8CacheName, ": query must be float16, bfloat16, float32 or float64, got ",
      dtype_name(dtype));
  TORCH_CHECK_VALUE(query.dim() == 4, kInt8CacheName,
                    ": query must have 4 dimensions (B, Hq, Sq, D), got ", query.dim());
  TORCH_CHECK_VALUE(holds(query.sym_size(3).sym_ge(1)), kInt8CacheName,
                    ": query must have a head dimension of at least 1, got ", query.sym_size(3));
}

void check_cache(const Tensor& query, const Tensor& key, const Tensor& value, bool is_paged) {
  const char* const shape = is_paged ? "(num_blocks, block_size, Hkv, D)" : "(B, Hkv, Sk, D)";
  for (const auto& [argument, tensor] : {std::pair("key", key), {"value", value}}) {
    TORCH_CHECK_VALUE(tensor.dim() == 4, kInt8CacheName, ": ", argument, " must have 4 dimensions ",
                      shape, ", got ", tensor.dim());
  }
  const auto batch = is_paged ? key.sym_size(0) : query.sym_size(0);
  const auto rows = key.sym_size(1), columns = key.sym_size(2);
  check_tensor("key", key, at::kChar, {batch, rows, columns, query.sym_size(3)}, shape, query);
  check_tensor("value", value, at::kChar, {batch, rows, columns, value.sym_size(3)}, shape, query);
  TORCH_CHECK_VALUE(holds(value.sym_size(3).sym_ge(1)), kInt8CacheName,
                    ": value must have a head dimension of at least 1, got ", value.sym_size(3));
  const auto heads = query.sym_size(1), key_heads = is_paged ? columns : rows;
  const auto left = is_known(key_heads.sym_eq(0)) ? heads : heads % key_heads;
  TORCH_CHECK_VALUE(holds(left.sym_eq(0)), kInt8CacheName, ": query must have a multiple of key's ",
                    key_heads, " heads, got ", heads);
  TORCH_CHECK_VALUE(!is_paged || holds(rows.sym_ge(1)), kInt8CacheName,
                    ": key must have a block size of at least 1, got ", rows);
}

Operand pages_of(const Tensor& tensor) {
  return Operand(tensor.transpose(1, 2));
}

// Values of the integer tensors, read once.
struct Places {
  std::vector<int64_t> lengths;
  std::vector<int32_t> blocks;
  int64_t columns = 0;
};

Places read_places(const Tensor& query, const Tensor& key, const OptionalTensor& seqused_k,
                   const OptionalTensor& block_table) {
  Places places;
  const int64_t page_size = block_table ? key.size(1) : 0;
  const int64_t room = block_table ? block_table->size(1) * page_size : key.size(2);
  places.lengths.assign(query.size(0), room);
  if (seqused_k) {
    const Tensor used = read_once(*seqused_k);
    for (int64_t i = 0; i < query.size(0); ++i) {
      const int64_t length = used.const_data_ptr<int32_t>()[i];
      TORCH_CHECK_VALUE(length >= 0 && length <= room, kInt8CacheName,
                        ": seqused_k must be from 0 to ", room, " for sequence ", i, ", got ",
                        length);
      places.lengths[i] = length;
    }
  }
  if (!block_table) return places;
  const Tensor table = read_once(*block_table);
  places.columns = table.size(1);
  places.blocks.assign(table.const_data_ptr<int32_t>(),
                       table.const_data_ptr<int32_t>() + table.numel());
  for (int64_t i = 0; i < query.size(0); ++i) {
    for (int64_t page = 0; page < ceil_divide(places.lengths[i], page_size); ++page) {
      const int64_t block = places.blocks[i * places.columns + page];
      TORCH_CHECK_VALUE(block >= 0 && block < key.size(0), kInt8CacheName,
                        ": block_table must have block numbers from 0 to ", key.size(0) - 1,
                        ", got ", block, " for sequence ", i);
    }
  }
  return places;
}

std::tuple<Tensor, Tensor> attention_int8_cache(const AttentionArguments& arguments) {
  check_attention(arguments);
  const auto& inputs = arguments.inputs();
  const auto& options = arguments.options();
  const auto& [query, key, value, block_table] =
      std::tie(inputs.query, inputs.key, inputs.value, inputs.block_table);
  const Places places = read_places(query, key, inputs.seqused_k, block_table);
  const bool is_paged = block_table.has_value();
  const auto batch = query.size(0), heads = query.size(1), rows = query.size(2);
  const Tensor output = new_tensor({batch, heads, rows, value.size(3)}, query.options());
  const Tensor logsumexp =
      at::empty({batch, heads, rows}, query.options().dtype(compute_type(query)));
  Parameters parameters{};
  parameters.batch = batch;
  parameters.query_heads = heads;
  parameters.key_heads = key.size(is_paged ? 2 : 1);
  parameters.group = parameters.key_heads == 0 ? 1 : heads / parameters.key_heads;
  parameters.query_length = rows;
  parameters.key_length = is_paged ? 0 : key.size(2);
  parameters.head_dim = query.size(3);
  parameters.value_dim = value.size(3);
  parameters.query = Operand(query);
  const auto operand = is_paged ? &pages_of : [](const Tensor& it) { return Operand(it); };
  parameters.key = operand(key);
  parameters.value = operand(value);
  parameters.has_int8_cache = true;
  parameters.key_scale = operand(inputs.key_scale);
  parameters.value_scale = operand(inputs.value_scale);
  parameters.output = Operand(output);
  parameters.logsumexp = Operand(logsumexp);
  if (is_paged) {
    parameters.page_size = key.size(1);
    parameters.block_table = places.blocks.data();
    parameters.block_table_stride = places.columns;
  }
  Extras extras;
  set_options(parameters, extras, inputs, options, std::nullopt);
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < batch; ++i) sequences.push_back({i, 0, rows, 0, places.lengths[i]});
  run_forward(parameters, query, sequences, options);
  return {output, logsumexp};
}

}  // namespace

void check_attention_int8_cache(const AttentionInputs& inputs, const AttentionOptions& options) {
  const auto& [query, key, value, sinks, seqused_k, block_table] = std::tie(
      inputs.query, inputs.key, inputs.value, inputs.sinks, inputs.seqused_k, inputs.block_table);
  check_query(query);
  check_cache(query, key, value, block_table.has_value());
  const auto sizes = key.sym_sizes().slice(0, 3);
  const char* const shape = block_table ? "(num_blocks, block_size, Hkv)" : "(B, Hkv, Sk)";
  check_tensor("key_scale", inputs.key_scale, compute_type(query), sizes, shape, query);
  check_tensor("value_scale", inputs.value_scale, compute_type(query), sizes, shape, query);
  const auto batch = query.sym_size(0);
  if (sinks) {
    const auto dtype =
        sinks->scalar_type() == query.scalar_type() ? query.scalar_type() : at::kFloat;
    check_tensor("sinks", *sinks, dtype, {query.sym_size(1)}, "(Hq)", query);
  }
  if (seqused_k) check_tensor("seqused_k", *seqused_k, at::kInt, {batch}, "(B)", query);
  if (block_table) {
    TORCH_CHECK_VALUE(block_table->dim() == 2, kInt8CacheName,
                      ": block_table must have 2 dimensions (B, max_blocks), got ",
                      block_table->dim());
    check_tensor("block_table", *block_table, at::kInt, {batch, block_table->sym_size(1)},
                 "(B, max_blocks)", query);
  }
  check_scores(kInt8CacheName, options);
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_boxed_kernel<"foo::attention_int8_cache", &attention_int8_cache>(library);
}

}  // namespace foo
