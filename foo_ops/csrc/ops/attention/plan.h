// Cuts the work of a call into blocks of queries, and these into pieces for the kernels.

#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "ops/attention/arguments.h"

namespace foo {

// The first and the last key that attn_bias shows to each query. Kernels skip the keys before and
// after.
class MaskBounds {
 public:
  // Scans each row of the bias, which must be given, from both ends to a key that is not hidden.
  MaskBounds(const Parameters& parameters, at::ScalarType query_type,
             const AttentionOptions& options);

  // Returns nullopt without a bias.
  static std::optional<MaskBounds> of(const Parameters& parameters, at::ScalarType query_type,
                                      const AttentionOptions& options);

  // Removes keys at both ends that the bias hides from all queries of a piece.
  void narrow(Piece& piece) const;

 private:
  struct Bounds {
    int64_t first, stop;
  };

  // Strides in rows_, 0 where the bias is broadcast.
  int64_t batch_step_, head_step_, row_step_;
  std::vector<Bounds> rows_;
};

// Returns the number of queries, counted over the heads.
inline int64_t rows_of(const Piece& piece) {
  return piece.heads * piece.query_count;
}

// Returns the number of visited pairs of a query and a key.
inline int64_t work_of(const Piece& piece) {
  return rows_of(piece) * (piece.key_stop - piece.key_start);
}

// Whether the blocks have enough work for many threads. With less, more pieces cost more than they
// give: two threads took 1.09 times as long for 4 heads of 1,024 queries and keys in bfloat16.
bool have_much_work(const std::vector<Piece>& blocks);

// Returns the piece with the most rows, for which a kernel needs the most memory. `pieces` must not
// be empty.
const Piece& largest_of(const std::vector<Piece>& pieces);

// A row of the batch, or a packed sequence.
struct Sequence {
  int64_t batch, query_offset, query_length, key_offset, key_length;

  bool operator==(const Sequence&) const = default;
};

inline int64_t ceil_divide(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

inline int64_t round_up_to_vector(int64_t count) {
  return ceil_divide(count, kWidestVector) * kWidestVector;
}

// Returns the keys of equal parts, in whole tiles.
inline int64_t part_of_keys(int64_t keys, int64_t parts) {
  return ceil_divide(ceil_divide(keys, parts), kKeyBlock) * kKeyBlock;
}

// Returns all blocks of queries of all sequences and heads, with the keys that they see. Blocks of
// heads that share a key head are adjacent. They have the number of queries that is fastest if a
// tile holds all of them.
std::vector<Piece> cut_into_blocks(const Parameters& parameters,
                                   const std::vector<Sequence>& sequences,
                                   const AttentionOptions& options,
                                   const std::optional<MaskBounds>& bounds = std::nullopt);

// Cuts the keys of each block into splits of length_of(keys), a multiple of kKeyBlock. Blocks with
// several splits get a slot each. The first splits of all blocks come first, then the second ones.
std::vector<Piece> split_keys(std::vector<Piece>& blocks,
                              const std::function<int64_t(int64_t keys)>& length_of);

// Pieces of a forward pass.
struct ForwardPlan {
  // Pieces for the few-queries kernel, and all others.
  std::vector<Piece> few_queries, pieces;
  // Blocks whose keys are split, the most splits of one of them, and the most rows.
  std::vector<Piece> split_blocks;
  int64_t key_splits = 0, rows = 0;
};

// Plans a forward pass. Keys are split if there are few blocks.
ForwardPlan plan_forward(const Parameters& parameters, const std::vector<Sequence>& sequences,
                         const AttentionOptions& options, const std::optional<MaskBounds>& bounds);

// Tells which blocks add to the same sums, besides those of the same keys: all rows of the batch,
// or all heads. These blocks are a family; those of a family with the same number run one after the
// other.
struct SharedSums {
  bool batch = false;
  bool heads = false;

  bool any() const { return batch || heads; }
  int64_t families(const Parameters& parameters) const {
    return (batch ? 1 : parameters.batch) * (heads ? 1 : parameters.key_heads);
  }
  int64_t family(const Parameters& parameters, const Piece& block) const {
    const int64_t row = batch ? 0 : block.batch;
    return heads ? row : row * parameters.key_heads + block.head / parameters.group;
  }
};

// Divides pieces into a share of neighbours for each thread, with the largest pieces first, so that
// no thread waits long at the end.
std::vector<std::vector<Piece>> shares_of(const std::vector<Piece>& pieces);

}  // namespace foo
