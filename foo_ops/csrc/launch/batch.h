// Parallel loops that wait for each other, and then run as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "launch/jobs.h"

namespace foo {

// The jobs of a call, which do not depend on each other.
struct Loop {
  int64_t jobs;
  // Bytes of scratch memory that a job needs.
  int64_t bytes;
  std::function<void(int64_t job, void* scratch)> work;
  // Cost of a job, for plans.
  std::function<double(int64_t job)> cost;
  // Keeps the memory that the jobs read and write.
  std::vector<at::Tensor> tensors;
};

// While an instance lives, its thread's calls on the CPU may leave their loops to it; without `run`
// these are not computed. No call may read another's output. Where the query, key and value of a
// token are computed from 1024 numbers of bfloat16, two threads of a Zen 4 take 0.85 to 0.9 of the
// time that three loops take, and 0.65 to 0.78 with weights of 8 bits.
class LoopBatch {
 public:
  LoopBatch() : outer_(std::exchange(current_, this)) {}
  ~LoopBatch() { current_ = outer_; }
  LoopBatch(const LoopBatch&) = delete;
  LoopBatch& operator=(const LoopBatch&) = delete;

  // Returns this thread's batch, if it takes calls with such an output.
  static LoopBatch* of(const at::Tensor& output) { return output.is_cpu() ? current_ : nullptr; }

  void add(Loop loop) { loops_.push_back(std::move(loop)); }

  void run() {
    std::vector<int64_t> ends;
    int64_t jobs = 0, bytes = 0;
    for (const Loop& loop : loops_) {
      ends.push_back(jobs += loop.jobs);
      bytes = std::max(bytes, loop.bytes);
    }
    const auto place_of = [&](int64_t job) {
      const auto loop = std::upper_bound(ends.begin(), ends.end(), job) - ends.begin();
      return std::pair(loop, job - (loop == 0 ? 0 : ends[loop - 1]));
    };
    const auto cost = [&](int64_t job) {
      const auto [loop, own] = place_of(job);
      return loops_[loop].cost(own);
    };
    share_jobs(
        jobs,
        [&](int64_t thread, auto next) {
          const ScratchMemory scratch(scratch_pool(), thread, bytes);
          for (int64_t job = next(); job >= 0; job = next()) {
            const auto [loop, own] = place_of(job);
            loops_[loop].work(own, scratch.get());
          }
        },
        cost);
    loops_.clear();
  }

 private:
  static inline thread_local LoopBatch* current_ = nullptr;

  LoopBatch* outer_;
  std::vector<Loop> loops_;
};

}  // namespace foo
