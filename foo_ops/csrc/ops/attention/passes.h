// Forward and backward passes of attention, dense and packed: run the kernels on the pieces of a
// call.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "launch/jobs.h"
#include "ops/attention/arguments.h"
#include "ops/attention/plan.h"
#include "ops/attention/programs.h"

namespace foo {

// Results of the forward kernel for key splits: for each row of a slot the largest score, in units
// of log 2, the sum of 2^(score - largest), and the values summed with these weights.
class PartialResults {
 public:
  // Allocates key_splits splits of ``slots`` blocks of up to ``rows`` rows, and sets the
  // parameters' pointers.
  void allocate(Parameters& parameters, int64_t key_splits, int64_t slots, int64_t rows,
                at::ScalarType type);

 private:
  at::Tensor output_, largest_, total_;
};

// For the backward pass, finds the blocks whose logsumexp is so large that its digits do not
// suffice, recomputes their softmax statistics, and sets the blocks' slots of them.
void compute_statistics(Parameters& parameters, PartialResults& results, std::vector<Piece>& blocks,
                        const at::Tensor& query);

// Runs the forward kernels on the blocks of all sequences, with split keys if there are few.
void run_forward(Parameters& parameters, const at::Tensor& query,
                 const std::vector<Sequence>& sequences, const AttentionOptions& options);

// The gradients of attention, dense and packed.

// Sums the tensor over a dimension, which it keeps, in double precision and in a fixed order.
// at::sum does not guarantee one.
at::Tensor sum_in_order(const at::Tensor& tensor, int64_t dim);

class BiasGradient {
 public:
  // Gradient of attn_bias: blocks of queries write tiles of it, or add to sums that become it. Sets
  // what the kernel writes in `parameters`, which must outlive this.
  BiasGradient(Parameters& parameters, const at::Tensor& bias, at::ScalarType compute_type);

  // Returns which blocks add to the same tile.
  SharedSums sharing() const;

  // Allocates the sums: ``slots`` for each key head.
  void allocate(int64_t slots, bool all_keys_are_seen);
  // Returns the offset at which a block begins; the block's slot must be set.
  int64_t place_of(const Piece& block) const;

  // Returns the gradient. Call this when all blocks have run.
  at::Tensor total() const;

 private:
  bool has_row_sums() const { return parameters_.bias_gradient == kAdded && sizes_[2] == 1; }

  Parameters& parameters_;
  const at::Tensor& bias_;
  const at::ScalarType compute_type_;
  // Sizes of the bias, padded to four dimensions.
  std::vector<int64_t> sizes_;
  bool is_shared_;
  at::Tensor sums_;
};

// A range of rows in the sums of a key head.
struct Rows {
  int64_t begin, end;
};

// Blocks that add to the same sums, the last one first: all blocks of a key head, counted over the
// sequences, or one of its chunks.
struct Chunk {
  int64_t key_head;
  std::vector<Piece> blocks;

  // Returns the range of keys that the blocks visit.
  Rows keys() const;
};

// Groups the blocks of the backward pass into jobs and gives each block its slot; each key head has
// as many slots as there are chunks. ``blocks`` must be in the order of cut_into_blocks.
std::vector<std::vector<Chunk>> cut_into_jobs(const Parameters& parameters,
                                              std::vector<Piece> blocks,
                                              const std::optional<BiasGradient>& bias,
                                              const SharedSums& shared);

// Returns the rows that each slot has sums of after its chunk has run. A key head may have fewer
// blocks than there are chunks.
std::vector<Rows> rows_of_slots(const std::vector<std::vector<Chunk>>& jobs, int64_t slots);

// Gradients for query, key, value, attn_bias, alibi_slopes and sinks; of size 0 if not given.
using AttentionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Runs the backward kernel on the blocks of all sequences. If programs change the scores, also
// computes the gradients of their captured tensors. Tensors are (total, heads, dim) if packed, else
// (batch, heads, length, dim).
AttentionGradients run_backward(Parameters& parameters, const AttentionInputs& inputs,
                                const std::vector<Sequence>& sequences,
                                const AttentionOptions& options, bool is_packed,
                                ProgramCall* programs = nullptr);

}  // namespace foo
