// The first and the last key that attn_bias shows to each query, so that kernels need not visit the
// keys before and behind them.

#pragma once

#include <optional>
#include <vector>

#include "ops/attention/parameters.h"

namespace foo {

class MaskBounds {
 public:
  // Reads each row of the bias, which must be there, from both ends, up to a number that is not
  // hidden.
  MaskBounds(const Parameters& parameters, at::ScalarType query_type,
             const AttentionOptions& options);

  // None without a bias.
  static std::optional<MaskBounds> of(const Parameters& parameters, at::ScalarType query_type,
                                      const AttentionOptions& options);

  // Leaves out the keys that the bias hides from all queries of a piece.
  void narrow(Piece& piece) const;

 private:
  struct Bounds {
    int64_t first, stop;
  };

  // The steps in rows_, 0 where the bias is broadcast.
  int64_t batch_step_, head_step_, row_step_;
  std::vector<Bounds> rows_;
};

}  // namespace foo
