// Runs a kernel of the package on the pieces of a call, in parallel.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#include "launch/scratch_memory.h"
#include "launch/thread_shares.h"

namespace foo {

// The memory that kernels work in, in a place for each thread of a call. It is never destroyed.
inline ScratchPool& scratch_pool() {
  static auto* pool = new ScratchPool();
  return *pool;
}

// Calls work(thread, next) on each thread that takes part, where next() is the job that it is to do
// then, or -1 when all have been begun. Threads are counted from 0, fewer than
// at::get_num_threads().
template <class Work>
void share_jobs(int64_t jobs, Work work) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), jobs);
  ThreadShares shares(jobs, threads);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      work(thread, [&] { return shares.take(thread); });
    }
  });
}

// Calls work(job, thread, call) for each job, in parallel, where call(piece) runs the kernel in the
// thread's own scratch memory. The result is the same whichever thread does a job. Where ``bytes``
// is given, the kernel only writes there how much scratch memory it needs for a piece; none needs
// more than ``largest``.
template <class Parameters, class Piece, class Work>
void run_jobs(const Parameters& parameters,
              void (*kernel)(const Parameters* parameters, const Piece* piece, void* scratch,
                             int64_t* bytes),
              int64_t jobs, const Piece& largest, Work work) {
  int64_t bytes = 0;
  kernel(&parameters, &largest, nullptr, &bytes);
  share_jobs(jobs, [&](int64_t thread, auto next) {
    const ScratchMemory scratch(scratch_pool(), thread, bytes);
    const auto call = [&](const Piece& piece) {
      kernel(&parameters, &piece, scratch.get(), nullptr);
    };
    for (int64_t job = next(); job >= 0; job = next()) work(job, thread, call);
  });
}

}  // namespace foo
