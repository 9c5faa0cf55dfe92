// The gradients of attention, dense and packed.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "ops/attention/parameters.h"
#include "ops/attention/plan.h"
#include "ops/attention/programs.h"
#include "ops/attention/run.h"

namespace foo {

// The gradient of attn_bias: blocks of queries write tiles of it, or sums that become it.

// Sums the tensor, in double precision, over a dimension, which it keeps, in one fixed order.
// at::sum promises none.
at::Tensor sum_in_order(const at::Tensor& tensor, int64_t dim);

class BiasGradient {
 public:
  // Tells the kernel what to write. The parameters must outlive this.
  BiasGradient(Parameters& parameters, const at::Tensor& bias, at::ScalarType compute_type);

  // Which blocks add to one tile.
  SharedSums sharing() const;

  // Makes room for the sums: ``slots`` for each key head.
  void allocate(int64_t slots, bool all_keys_are_seen);
  // Where a block, which has its slot, begins.
  int64_t place_of(const Piece& block) const;

  // To be called when all blocks have run.
  at::Tensor total() const;

 private:
  bool has_row_sums() const { return parameters_.bias_gradient == kAdded && sizes_[2] == 1; }

  Parameters& parameters_;
  const at::Tensor& bias_;
  const at::ScalarType compute_type_;
  // The sizes of the bias with four dimensions.
  std::vector<int64_t> sizes_;
  bool is_shared_;
  at::Tensor sums_;
};

// The blocks of the backward pass, in chunks that different threads may run.

// Rows of the sums of a key head.
struct Rows {
  int64_t begin, end;
};

// Blocks that add to the same sums, and so run one after the other: all of a key head, counted over
// the sequences, or one of its chunks.
struct Chunk {
  int64_t key_head;
  std::vector<Piece> blocks;

  // The keys that its blocks visit.
  Rows keys() const;
};

// Gives each block its slot, of which each key head has as many as there are chunks. ``blocks``
// must be in the order of cut_into_blocks.
std::vector<std::vector<Chunk>> cut_into_jobs(const Parameters& parameters,
                                              std::vector<Piece> blocks,
                                              const std::optional<BiasGradient>& bias,
                                              const SharedSums& shared);

// The rows that each slot has sums of, when its chunk has run. A key head may have fewer blocks
// than there are chunks.
std::vector<Rows> rows_of_slots(const std::vector<std::vector<Chunk>>& jobs, int64_t slots);

// The gradients for query, key, value, attn_bias, alibi_slopes and sinks; of size 0 for what was
// not given.
using AttentionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Runs the backward kernel on the blocks of all sequences; where programs change the scores, also
// for the tensors that these have captured. Tensors are (total, heads, dim) if they
// are packed, else (batch, heads, length, dim).
AttentionGradients run_backward(Parameters& parameters, const AttentionInputs& inputs,
                                const std::vector<Sequence>& sequences,
                                const AttentionOptions& options, bool attn_bias_requires_grad,
                                bool is_packed, ProgramCall* programs = nullptr);

}  // namespace foo
