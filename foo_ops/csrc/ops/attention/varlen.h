// Attention of packed sequences, and of keys in pages.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/attention/checks.h"
#include "ops/attention/parameters.h"
#include "ops/attention/plan.h"

namespace foo {

// What calls with packed sequences, and with keys in pages, have in common.

// The checked numbers of the tensors of integers, which are read once, since another thread may
// write to them at any time.
struct Lengths {
  std::vector<int64_t> query_offsets, key_offsets, query_lengths, key_lengths;
  // A row for each sequence with the numbers of the blocks in use.
  std::vector<int32_t> pages;
  // The length of such a row.
  int64_t columns = 0;
};

// Raises, in the name of an operator, for sequences and blocks that are not inside the tensors.
Lengths lengths_of(const char* name, const AttentionInputs& inputs,
                   const AttentionOptions& options);

// (total, heads, dim) as (1, heads, total, dim) with no step from a batch row to the next.
Operand packed(const at::Tensor& tensor);

// (heads, total) as (1, heads, total, 1).
Operand packed_rows(const at::Tensor& tensor);

struct PackedCall {
  Parameters parameters{};
  Extras extras;
  std::vector<Sequence> sequences;

  // ``lengths`` must outlive the call.
  PackedCall(const AttentionInputs& inputs, const Lengths& lengths, const AttentionOptions& options,
             const std::optional<at::Tensor>& seed);
};

// The blocks that hold keys in use, one sequence after the other.
class UsedBlocks {
 public:
  // Lets ``lengths`` say where the sequences begin among the rows of these blocks.
  UsedBlocks(Lengths& lengths, const at::Tensor& key);

  // (num_blocks, block_size, heads, dim) as (rows, heads, dim).
  at::Tensor gather(const at::Tensor& pages, at::ScalarType type) const;

  // The gradient of gather: rounded to the dtype of ``pages`` once it is summed over the sequences
  // that share a block.
  at::Tensor scatter(const at::Tensor& gradient, const at::Tensor& pages) const;

 private:
  // The numbers of all blocks, each number once, and for each block its place among the latter.
  at::Tensor numbers_, distinct_, places_;
};

}  // namespace foo
