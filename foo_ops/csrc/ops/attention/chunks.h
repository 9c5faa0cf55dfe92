// The blocks of the backward pass, in chunks that different threads may run.
#pragma once

#include <optional>
#include <vector>

#include "ops/attention/bias_gradient.h"
#include "ops/attention/run.h"

namespace foo {

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

}  // namespace foo
