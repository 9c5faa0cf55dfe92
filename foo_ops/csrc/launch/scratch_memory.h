// Memory that calls use again and again.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace foo {

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

}  // namespace foo
