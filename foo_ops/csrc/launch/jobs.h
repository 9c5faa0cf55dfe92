// Runs a kernel of the package on the pieces of a call, in parallel, with scratch memory.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace foo {

// Memory that calls use again and again.

// Blocks of memory that wait for the next call, in places that calls number from 0. Memory that
// goes back to the system comes again page by page, which took 4 % of a short backward pass, and 10
// % of a long one with one head. It is never destroyed, and nothing of it belongs to a thread:
// threads may end, and a process may fork, at any time.
class ScratchPool {
 public:
  ScratchPool() = default;
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

 private:
  friend class ScratchMemory;

  // The header before the memory. A block belongs to a place also while a call has it.
  struct alignas(64) Block {
    int64_t bytes;
    int64_t place;
    // How many calls in a row needed only a small part of it.
    int64_t calls_with_little;
    bool is_kept;
  };

  // It lies in a line of the cache of its own.
  struct alignas(64) Place {
    std::atomic<Block*> block{nullptr};
  };

  static constexpr int64_t kPlaces = 256;

  Block* take(int64_t place, int64_t bytes);
  void give_back(Block* block);

  Block* take_waiting(int64_t place, int64_t bytes);
  void release_larger_than(int64_t bytes);
  Block* allocate(int64_t place, int64_t bytes);
  static void release(Block* block);

  std::array<Place, kPlaces> places_;
};

// Holds so many undefined bytes of a pool for as long as this lives. Calls that use one place at
// the same time get blocks of their own.
class ScratchMemory {
 public:
  ScratchMemory(ScratchPool& pool, int64_t place, int64_t bytes)
      : pool_(pool), block_(pool.take(place % ScratchPool::kPlaces, bytes)) {}
  ~ScratchMemory() { pool_.give_back(block_); }

  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;

  void* get() const { return block_ + 1; }

 private:
  ScratchPool& pool_;
  ScratchPool::Block* block_;
};

// The division of a call's jobs among threads.

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

// Runs a kernel of the package on the pieces of a call, in parallel.

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
