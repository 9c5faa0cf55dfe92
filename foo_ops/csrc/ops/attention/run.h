// Runs the kernels of attention on the pieces of a call.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "launch/scratch_memory.h"
#include "launch/thread_shares.h"
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

// The memory that kernels work in, in a place for each thread of a call.
ScratchPool& scratch_pool();

// Calls work(job, thread, call) for each job, in parallel, where call(piece) runs the kernel in the
// thread's own scratch memory, and threads are counted from 0, fewer than at::get_num_threads().
// The result is the same whichever thread does a job. No piece has more rows than
// ``largest``.
template <class Work>
void run_jobs(const Parameters& parameters, AttentionFunction* kernel, int64_t jobs,
              const Piece& largest, Work work) {
  int64_t bytes = 0;
  kernel(&parameters, &largest, nullptr, &bytes);
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), jobs);
  ThreadShares shares(jobs, threads);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const ScratchMemory scratch(scratch_pool(), begin, bytes);
    for (int64_t thread = begin; thread < end; ++thread) {
      const auto call = [&](const Piece& piece) {
        kernel(&parameters, &piece, scratch.get(), nullptr);
      };
      for (int64_t job = shares.take(thread); job >= 0; job = shares.take(thread)) {
        work(job, thread, call);
      }
    }
  });
}

}  // namespace foo
