// The division of a call's jobs among threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace foo {

// Each thread does the jobs of its own share first, neighbours of one another, and then those that
// other threads have not begun. Calls of one shape so find in a thread's caches what the last one
// left there.
class ThreadShares {
 public:
  ThreadShares(int64_t jobs, int64_t threads) : jobs_(jobs), next_(threads) {
    for (int64_t thread = 0; thread < threads; ++thread) {
      next_[thread].job = begin(thread, jobs, threads);
    }
  }

  // Where the share of a thread begins; it ends where that of the next does.
  static int64_t begin(int64_t thread, int64_t jobs, int64_t threads) {
    return thread * jobs / threads;
  }

  // The job that a thread is to do next, or -1 when all have been begun.
  int64_t take(int64_t thread) {
    const auto threads = static_cast<int64_t>(next_.size());
    for (int64_t offset = 0; offset < threads; ++offset) {
      const int64_t owner = (thread + offset) % threads;
      const int64_t job = next_[owner].job++;
      if (job < begin(owner + 1, jobs_, threads)) {
        return job;
      }
    }
    return -1;
  }

 private:
  // It lies in a line of the cache of its own.
  struct alignas(64) Next {
    std::atomic<int64_t> job{0};
  };

  const int64_t jobs_;
  std::vector<Next> next_;
};

}  // namespace foo
