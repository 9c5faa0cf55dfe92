// Attention of packed sequences, and of paged keys.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/attention/arguments.h"
#include "ops/attention/plan.h"

namespace foo {

// Checked values of the integer tensors, which are read only once, since another thread may write
// to them at any time.
struct Lengths {
  std::vector<int64_t> query_offsets, key_offsets, query_lengths, key_lengths;
  // A row of block numbers in use for each sequence.
  std::vector<int32_t> pages;
  // Length of each row of ``pages``.
  int64_t columns = 0;
};

// Reads and checks the lengths; raises in the operator's name for sequences and blocks that are not
// inside the tensors.
Lengths lengths_of(const char* name, const AttentionInputs& inputs,
                   const AttentionOptions& options);

// Views (total, heads, dim) as (1, heads, total, dim) with a batch stride of 0.
Operand packed(const at::Tensor& tensor);

// Views (heads, total) as (1, heads, total, 1).
Operand packed_rows(const at::Tensor& tensor);

struct PackedCall {
  Parameters parameters{};
  Extras extras;
  std::vector<Sequence> sequences;

  // ``lengths`` must outlive the call.
  PackedCall(const AttentionInputs& inputs, const Lengths& lengths, const AttentionOptions& options,
             const std::optional<at::Tensor>& seed);
};

// Blocks that hold keys in use, sequence by sequence.
class UsedBlocks {
 public:
  // Makes the key offsets in ``lengths`` refer to the rows of these blocks.
  UsedBlocks(Lengths& lengths, const at::Tensor& key);

  // Copies the blocks of (num_blocks, block_size, heads, dim) to (rows, heads, dim).
  at::Tensor gather(const at::Tensor& pages, at::ScalarType type) const;

  // Gradient of gather: sums over the sequences that share a block, then rounds to the dtype of
  // ``pages``.
  at::Tensor scatter(const at::Tensor& gradient, const at::Tensor& pages) const;

 private:
  // Numbers of all blocks, the distinct ones, and each block's index among the latter.
  at::Tensor numbers_, distinct_, places_;
};

}  // namespace foo
