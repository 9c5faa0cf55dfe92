// Runs a kernel of the package on the pieces of a call, in parallel, with scratch memory.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "launch/scope.h"

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

// Divides chains of jobs among threads. The jobs of a chain begin in their order. Each thread first
// does the chains of its own share, then chains that other threads have not begun, as in
// ThreadShares; it owns these. When all chains have owners, it helps with the next job of the chain
// where that job costs most.
class JobChains {
 public:
  struct Job {
    int64_t chain, position, owner;
  };

  // Takes the costs of each chain's jobs.
  JobChains(std::vector<std::vector<double>> costs, int64_t threads)
      : costs_(std::move(costs)),
        chains_(costs_.size()),
        unowned_(static_cast<int64_t>(costs_.size()), threads),
        owners_(threads) {}

  // Returns the next job for a thread, or nothing when all have begun.
  std::optional<Job> take(int64_t thread) {
    Owner& owner = owners_[thread];
    while (owner.seeks) {
      if (owner.chain >= 0) {
        if (const auto job = begin_next(owner.chain)) return job;
      }
      owner.chain = unowned_.take(thread);
      owner.seeks = owner.chain >= 0;
      if (owner.seeks) chains_[owner.chain].owner = thread;
    }
    return help();
  }

 private:
  // Each has a cache line of its own.
  struct alignas(64) Chain {
    std::atomic<size_t> next{0};
    int64_t owner = 0;
  };
  struct alignas(64) Owner {
    int64_t chain = -1;
    bool seeks = true;
  };

  std::optional<Job> begin_next(int64_t chain) {
    const size_t position = chains_[chain].next++;
    if (position >= costs_[chain].size()) return std::nullopt;
    return Job{chain, static_cast<int64_t>(position), chains_[chain].owner};
  }

  std::optional<Job> help() {
    while (true) {
      int64_t best = -1;
      double most = -1;
      bool has_waiting_owner = false;
      for (size_t chain = 0; chain < chains_.size(); ++chain) {
        const size_t position = chains_[chain].next;
        if (position >= costs_[chain].size()) continue;
        // The first job is the owner's, who is about to begin it.
        if (position == 0) {
          has_waiting_owner = true;
        } else if (costs_[chain][position] > most) {
          most = costs_[chain][position];
          best = static_cast<int64_t>(chain);
        }
      }
      if (best < 0 && !has_waiting_owner) return std::nullopt;
      if (best < 0) {
        std::this_thread::yield();
      } else if (const auto job = begin_next(best)) {
        return job;
      }
    }
  }

  const std::vector<std::vector<double>> costs_;
  std::vector<Chain> chains_;
  ThreadShares unowned_;
  std::vector<Owner> owners_;
};

// Returns the jobs of chains to the only thread, one chain after the other.
class ChainsInOrder {
 public:
  explicit ChainsInOrder(const std::vector<std::vector<double>>& costs) : costs_(costs) {}

  std::optional<JobChains::Job> operator()() {
    while (chain_ < costs_.size() && position_ == costs_[chain_].size()) {
      ++chain_;
      position_ = 0;
    }
    if (chain_ == costs_.size()) return std::nullopt;
    return JobChains::Job{static_cast<int64_t>(chain_), static_cast<int64_t>(position_++), 0};
  }

 private:
  const std::vector<std::vector<double>>& costs_;
  size_t chain_ = 0, position_ = 0;
};

// A parallel loop: the costs of its jobs, in multiplications, by chains, and the number of threads
// that run it. If there are no chains, each is a job.
struct PlannedLoop {
  std::vector<std::vector<double>> costs;
  bool has_chains;
  int64_t threads;
};

// While it lives, its thread's calls add their parallel loops to the plan instead of running them,
// so that tests can try any number of threads. What such calls return is not initialized.
class PlanRecorder : public Scope<PlanRecorder> {
 public:
  std::vector<PlannedLoop> loops;
};

// Scratch memory of kernels, with a place for each thread of a call. Never destroyed.
inline ScratchPool& scratch_pool() {
  static auto* pool = new ScratchPool();
  return *pool;
}

// Cost of jobs that are as good as equal, and each worth a thread.
struct EqualCost {
  double operator()(int64_t) const { return 1; }
};

// Cost of a parallel loop for each of its threads, in multiplications: 0.8 us at the rate of
// attention with a single query, which is the slowest. On a Zen 4, two threads that wait actively
// take 1.0 to 1.4 us longer for small calls than one if they are bound to cores, and 3.4 us if not.
// 16 threads of an Emerald Rapids take 15 to 87 us longer than a 16th of one thread's time.
constexpr double kWorkOfThread = 1 << 13;

// Returns the most work that one thread does in no more time than all threads. There is nothing
// between: at::parallel_for wakes all threads, however few have work, because of GNU OpenMP
// (pytorch#32008).
inline double most_work_of_one(int64_t threads) {
  const auto number = static_cast<double>(threads);
  return threads == 1 ? std::numeric_limits<double>::infinity()
                      : kWorkOfThread * number * number / (number - 1);
}

// Returns the number of threads that jobs of these costs are worth: one, or all.
template <class Cost>
int64_t threads_of(int64_t jobs, const Cost& cost) {
  const int64_t threads = at::get_num_threads();
  if (threads == 1) return 1;
  if constexpr (!std::is_same_v<Cost, EqualCost>) {
    const double most = most_work_of_one(threads);
    double work = 0;
    for (int64_t job = 0; job < jobs && work <= most; ++job) work += cost(job);
    if (work <= most) return 1;
  }
  return threads;
}

// Calls work(begin, end) on ranges of `count` steps, on one thread or on all. A step takes as long
// as `cost` multiplications.
template <class Work>
void share_steps(int64_t count, double cost, Work work) {
  const bool is_little =
      static_cast<double>(count) * cost <= most_work_of_one(at::get_num_threads());
  at::parallel_for(0, count, is_little ? count : 1, work);
}

// Calls work(thread) on each of up to ``jobs`` threads, numbered from 0. There are at most
// at::get_num_threads().
template <class Work>
void run_threads(int64_t threads, Work work) {
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) work(thread);
  });
}

// Calls work(thread, next) on each participating thread, of which there are up to `threads`; next()
// returns the thread's next job, or -1 when all have been begun. cost(job) is for plans.
template <class Work, class Cost>
void share_jobs_among(int64_t threads, int64_t jobs, Work work, Cost cost) {
  if (PlanRecorder* const recorder = PlanRecorder::current()) {
    PlannedLoop& loop = recorder->loops.emplace_back(PlannedLoop{{}, false, threads});
    for (int64_t job = 0; job < jobs; ++job) loop.costs.push_back({cost(job)});
    return;
  }
  threads = std::min(threads, jobs);
  if (threads == 1) {
    int64_t job = 0;
    work(0, [&] { return job < jobs ? job++ : -1; });
    return;
  }
  ThreadShares shares(jobs, threads);
  run_threads(threads, [&](int64_t thread) { work(thread, [&] { return shares.take(thread); }); });
}

// The same on one thread, or on all if the jobs are worth it. cost(job) is in multiplications.
template <class Work, class Cost = EqualCost>
void share_jobs(int64_t jobs, Work work, Cost cost = {}) {
  share_jobs_among(threads_of(jobs, cost), jobs, work, cost);
}

// The same for chains of jobs; next() returns a job of JobChains, or nothing.
template <class Work>
void share_chains(const std::vector<std::vector<double>>& costs, Work work) {
  const int64_t most = threads_of(static_cast<int64_t>(costs.size()), [&](int64_t chain) {
    return std::accumulate(costs[chain].begin(), costs[chain].end(), 0.0);
  });
  if (PlanRecorder* const recorder = PlanRecorder::current()) {
    recorder->loops.push_back({costs, true, most});
    return;
  }
  const auto jobs = std::accumulate(
      costs.begin(), costs.end(), int64_t{0},
      [](int64_t sum, const auto& chain) { return sum + static_cast<int64_t>(chain.size()); });
  const int64_t threads = std::min(most, jobs);
  if (threads == 1) return work(0, ChainsInOrder(costs));
  JobChains chains(costs, threads);
  run_threads(threads, [&](int64_t thread) { work(thread, [&] { return chains.take(thread); }); });
}

// A kernel with a thread's own scratch memory.
template <class Parameters, class Piece>
class KernelCall {
 public:
  // If ``bytes`` is given, a kernel only writes there how much scratch memory it needs for a piece.
  using Function = void(const Parameters* parameters, const Piece* piece, void* scratch,
                        int64_t* bytes);

  KernelCall(const Parameters& parameters, Function* kernel, int64_t thread, int64_t bytes)
      : parameters_(parameters), kernel_(kernel), scratch_(scratch_pool(), thread, bytes) {}

  void operator()(const Piece& piece) const {
    kernel_(&parameters_, &piece, scratch_.get(), nullptr);
  }

  // Returns how much scratch memory the kernel needs for any piece, if none needs more than
  // ``largest``.
  static int64_t bytes(const Parameters& parameters, Function* kernel, const Piece& largest) {
    int64_t result = 0;
    kernel(&parameters, &largest, nullptr, &result);
    return result;
  }

 private:
  const Parameters& parameters_;
  Function* const kernel_;
  const ScratchMemory scratch_;
};

// Calls work(job, thread, call) for each job, in parallel; call(piece) runs the kernel in the
// thread's own scratch memory. The result does not depend on which thread does a job. No piece
// needs more scratch memory than ``largest``.
template <class Parameters, class Piece, class Work, class Cost = EqualCost>
void run_jobs(const Parameters& parameters,
              void (*kernel)(const Parameters* parameters, const Piece* piece, void* scratch,
                             int64_t* bytes),
              int64_t jobs, const Piece& largest, Work work, Cost cost = {}) {
  using Call = KernelCall<Parameters, Piece>;
  const int64_t bytes = Call::bytes(parameters, kernel, largest);
  share_jobs(
      jobs,
      [&](int64_t thread, auto next) {
        const Call call(parameters, kernel, thread, bytes);
        for (int64_t job = next(); job >= 0; job = next()) work(job, thread, call);
      },
      cost);
}

// The same for chains of jobs: calls work(job, call) for each job of JobChains.
template <class Parameters, class Piece, class Work>
void run_chains(const Parameters& parameters,
                void (*kernel)(const Parameters* parameters, const Piece* piece, void* scratch,
                               int64_t* bytes),
                const std::vector<std::vector<double>>& costs, const Piece& largest, Work work) {
  using Call = KernelCall<Parameters, Piece>;
  const int64_t bytes = Call::bytes(parameters, kernel, largest);
  share_chains(costs, [&](int64_t thread, auto next) {
    const Call call(parameters, kernel, thread, bytes);
    for (auto job = next(); job.has_value(); job = next()) work(*job, call);
  });
}

}  // namespace foo
