// Runs a kernel of the package on the pieces of a call, in parallel, with scratch memory.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace foo {

// Memory that calls reuse: blocks wait for the next call, in places that calls number from 0.
// Memory that went back to the system returns page by page, which took 4 % of a short backward
// pass, and 10 % of a long one with one head. The pool is never destroyed, and no part of it
// belongs to a thread: threads may end, and a process may fork, at any time.
class ScratchPool {
 public:
  ScratchPool() = default;
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

 private:
  friend class ScratchMemory;

  // Header in front of the memory. A block keeps its place while a call uses it.
  struct alignas(64) Block {
    int64_t bytes;
    int64_t place;
    // Consecutive calls that needed only a small part of the block.
    int64_t calls_with_little;
    bool is_kept;
  };

  // Has a cache line of its own.
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

// Holds uninitialized bytes of a pool during its lifetime. Calls that use one place at the same
// time get separate blocks.
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

// Divides a call's jobs among threads. Each thread first does the jobs of its own share, which are
// neighbours, then jobs that other threads have not begun. So calls of the same shape find in a
// thread's caches what the previous call left there.
class ThreadShares {
 public:
  ThreadShares(int64_t jobs, int64_t threads) : jobs_(jobs), next_(threads) {
    for (int64_t thread = 0; thread < threads; ++thread) {
      next_[thread].job = begin(thread, jobs, threads);
    }
  }

  // First job of a thread's share, which ends where the next thread's begins.
  static int64_t begin(int64_t thread, int64_t jobs, int64_t threads) {
    return thread * jobs / threads;
  }

  // Returns the next job for a thread, or -1 when all have been begun.
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
  // Has a cache line of its own.
  struct alignas(64) Next {
    std::atomic<int64_t> job{0};
  };

  const int64_t jobs_;
  std::vector<Next> next_;
};

// Scratch memory of kernels, with a place for each thread of a call. Never destroyed.
inline ScratchPool& scratch_pool() {
  static auto* pool = new ScratchPool();
  return *pool;
}

// Calls work(thread, next) on each participating thread; next() returns the thread's next job, or
// -1 when all have been begun. Threads are numbered from 0, and there are at most
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

// Calls work(job, thread, call) for each job, in parallel; call(piece) runs the kernel in the
// thread's own scratch memory. The result does not depend on which thread does a job. If ``bytes``
// is given, the kernel only writes there how much scratch memory it needs for a piece; no piece
// needs more than ``largest``.
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
