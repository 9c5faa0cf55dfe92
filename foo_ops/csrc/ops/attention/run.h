// Runs the kernels of attention on the pieces of a call.

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "launch/jobs.h"
#include "ops/attention/parameters.h"
#include "ops/attention/plan.h"

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

}  // namespace foo
