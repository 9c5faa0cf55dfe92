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

// Runs the jobs of calls, which do not depend on each other, in one parallel loop. A call has
// jobs(), the bytes() of scratch memory that a job needs, work(job, scratch), and cost(job) in
// multiplications.
template <class Call>
void run_together(const std::vector<Call>& calls) {
  std::vector<int64_t> ends;
  int64_t jobs = 0, bytes = 0;
  for (const Call& call : calls) {
    ends.push_back(jobs += call.jobs());
    bytes = std::max(bytes, call.bytes());
  }
  const auto place_of = [&](int64_t job) {
    const auto index = std::upper_bound(ends.begin(), ends.end(), job) - ends.begin();
    return std::pair(index, job - (index == 0 ? 0 : ends[index - 1]));
  };
  share_jobs(
      jobs,
      [&](int64_t thread, auto next) {
        const ScratchMemory scratch(scratch_pool(), thread, bytes);
        for (int64_t job = next(); job >= 0; job = next()) {
          const auto [index, own] = place_of(job);
          calls[index].work(own, scratch.get());
        }
      },
      [&](int64_t job) {
        const auto [index, own] = place_of(job);
        return calls[index].cost(own);
      });
}

// A call of any kind, with the tensors whose memory it reads and writes.
class Loop {
 public:
  template <class Call>
  Loop(Call call, std::vector<at::Tensor> tensors)
      : jobs_(call.jobs()),
        bytes_(call.bytes()),
        work_([call](int64_t job, void* scratch) { call.work(job, scratch); }),
        cost_([call](int64_t job) { return call.cost(job); }),
        tensors_(std::move(tensors)) {}

  int64_t jobs() const { return jobs_; }
  int64_t bytes() const { return bytes_; }
  void work(int64_t job, void* scratch) const { work_(job, scratch); }
  double cost(int64_t job) const { return cost_(job); }

 private:
  int64_t jobs_, bytes_;
  std::function<void(int64_t job, void* scratch)> work_;
  std::function<double(int64_t job)> cost_;
  std::vector<at::Tensor> tensors_;
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
    run_together(loops_);
    loops_.clear();
  }

 private:
  static inline thread_local LoopBatch* current_ = nullptr;

  LoopBatch* outer_;
  std::vector<Loop> loops_;
};

}  // namespace foo
