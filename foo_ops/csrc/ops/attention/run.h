// Runs the kernels of attention on the pieces of a call.

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "launch/jobs.h"
#include "ops/attention/parameters.h"
#include "ops/attention/plan.h"

namespace foo {

// The forward kernel's results for a key split: for each row of its slot the largest score, in
// units of log 2, the sum of 2^(score - largest), and the values summed with these weights.
class PartialResults {
 public:
  // Makes room for so many key splits of ``slots`` blocks of up to ``rows`` rows. Parameters point
  // to it.
  void allocate(Parameters& parameters, int64_t key_splits, int64_t slots, int64_t rows,
                at::ScalarType type);

 private:
  at::Tensor output_, largest_, total_;
};

// Finds for the backward pass the blocks where the logsumexp is so large that its digits do not
// tell, computes the statistics of their softmax anew, and tells the blocks where these are.
void compute_statistics(Parameters& parameters, PartialResults& results, std::vector<Piece>& blocks,
                        const at::Tensor& query);

// Runs the forward kernels on the blocks of all sequences, the keys split where there are few.
void run_forward(Parameters& parameters, const at::Tensor& query,
                 const std::vector<Sequence>& sequences, const AttentionOptions& options);

}  // namespace foo
