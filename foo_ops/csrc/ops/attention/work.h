// What the kernels of attention get to know, and how the work is cut into pieces for them.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "launch/scratch_memory.h"
#include "launch/thread_shares.h"
#include "ops/attention/checks.h"
#include "ops/attention/parameters.h"

namespace foo {

// The plain kernels, without options, take half the time to compile, and most models need no other.
inline bool is_plain(const Parameters& parameters) {
  return parameters.modifies == 0 && parameters.dropout_threshold == 0;
}

// The queries of all heads.
inline int64_t rows_of(const Piece& piece) {
  return piece.heads * piece.query_count;
}

// The piece with the most rows, for which a kernel needs the most memory. There must be some.
const Piece& largest_of(const std::vector<Piece>& pieces);

// A row of the batch, or a packed sequence.
struct Sequence {
  int64_t batch, query_offset, query_length, key_offset, key_length;
};

inline int64_t ceil_divide(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

inline int64_t round_up_to_vector(int64_t count) {
  return ceil_divide(count, kWidestVector) * kWidestVector;
}

inline at::ScalarType compute_type(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Tensors in the compute type that parameters point to.
struct Extras {
  at::Tensor alibi_slopes, sinks;
};

// Everything that does not depend on how the sequences lie in memory.
void set_options(Parameters& parameters, Extras& extras, const at::Tensor& query,
                 const std::optional<at::Tensor>& alibi_slopes,
                 const std::optional<at::Tensor>& sinks, const AttentionOptions& options,
                 const std::optional<at::Tensor>& seed);

// The seed of a call without one: drawn from the default generator if there is dropout.
std::optional<at::Tensor> draw_seed(const at::Tensor& query, double dropout_p);

// All blocks of queries of all sequences and heads, with the keys that they see. The blocks of the
// heads that share a key head follow one another. They have as many queries as are quickest where a
// tile holds all of them.
std::vector<Piece> cut_into_blocks(const Parameters& parameters,
                                   const std::vector<Sequence>& sequences,
                                   const AttentionOptions& options);

// What the forward kernel writes of a part of the keys: for each row of its slot the largest score,
// in units of log 2, the sum of 2^(score - largest), and the values summed with these weights.
class PartialResults {
 public:
  // For so many parts of ``slots`` blocks of up to ``rows`` rows. Parameters point to it.
  void allocate(Parameters& parameters, int64_t parts, int64_t slots, int64_t rows,
                at::ScalarType type);

 private:
  at::Tensor output_, largest_, total_;
};

// For the backward pass: computes anew what weights are made of in the blocks where the logsumexp
// is so large that its digits do not tell, and tells these where it is.
void compute_statistics(Parameters& parameters, PartialResults& results, std::vector<Piece>& blocks,
                        const at::Tensor& query);

// Runs the forward kernels on the blocks of all sequences, the keys split where there are few.
void run_forward(Parameters& parameters, const at::Tensor& query,
                 const std::vector<Sequence>& sequences, const AttentionOptions& options);

// The gradients for query, key, value, attn_bias, alibi_slopes and sinks; of size 0 for what was
// not given.
using AttentionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Runs the backward kernel on the blocks of all sequences. Tensors are (total, heads, dim) if they
// are packed, else (batch, heads, length, dim). attn_bias is given if its gradient is wanted.
AttentionGradients run_backward(Parameters& parameters, const at::Tensor& query,
                                const at::Tensor& key, const at::Tensor& value,
                                const std::optional<at::Tensor>& attn_bias,
                                const std::optional<at::Tensor>& alibi_slopes,
                                const std::optional<at::Tensor>& sinks,
                                const std::vector<Sequence>& sequences,
                                const AttentionOptions& options, bool is_packed);

// The memory that kernels work in, in a place for each thread of a call.
ScratchPool& scratch_pool();

// Calls work(job, thread, call) for each job, in parallel, where call(piece) runs the kernel in the
// thread's own scratch memory, and threads are counted from 0, fewer than at::get_num_threads().
// Which thread does a job makes no difference to the result. No piece has more rows than
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
