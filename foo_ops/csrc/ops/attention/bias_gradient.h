// The gradient of attn_bias: blocks of queries write tiles of it, or sums that become it.

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ops/attention/parameters.h"
#include "ops/attention/plan.h"

namespace foo {

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

}  // namespace foo
