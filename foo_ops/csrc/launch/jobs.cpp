#include "launch/jobs.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <thread>

namespace foo {

namespace {

// Limit on the bytes of a kept block: the sums of 16000 keys with one head of 64, in float32.
constexpr int64_t kMostBytes = int64_t{1} << 26;
// Limit on the bytes of all kept blocks: the scratch memory of kernels on each processor, and one
// block of sums.
int64_t most_bytes_in_all() {
  static const int64_t most =
      kMostBytes + (int64_t{1} << 22) * std::max(1u, std::thread::hardware_concurrency());
  return most;
}
// A block is freed after kPatience calls in a row that needed less than a fourth of it. That is
// more calls than a model's forward pass makes, after which the backward pass needs the block
// again.
constexpr int64_t kPatience = 64;
constexpr int64_t kLittle = 4;

std::atomic<int64_t> kept_bytes{0};

// Returns whether this many more bytes may be kept, and counts them if so.
bool reserve(int64_t bytes) {
  if (kept_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes <= most_bytes_in_all()) {
    return true;
  }
  kept_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  return false;
}

}  // namespace

ScratchPool::Block* ScratchPool::take(int64_t place, int64_t bytes) {
  Block* block = places_[place].block.exchange(nullptr, std::memory_order_acq_rel);
  if (block == nullptr) {
    block = take_waiting(place, bytes);
  }
  if (block != nullptr && block->bytes >= bytes) {
    const bool needs_little = bytes < block->bytes / kLittle;
    block->calls_with_little = needs_little ? block->calls_with_little + 1 : 0;
    if (block->calls_with_little < kPatience) {
      return block;
    }
    release_larger_than(kLittle * bytes);
  }
  if (block != nullptr) {
    release(block);
  }
  return allocate(place, bytes);
}

// Called if another call has the block of this place, or there was none yet. A block of another
// place keeps its place.
ScratchPool::Block* ScratchPool::take_waiting(int64_t place, int64_t bytes) {
  for (int64_t offset = 1; offset < kPlaces; ++offset) {
    Place& other = places_[(place + offset) % kPlaces];
    if (other.block.load(std::memory_order_relaxed) != nullptr) {
      Block* const block = other.block.exchange(nullptr, std::memory_order_acq_rel);
      if (block != nullptr) {
        if (block->bytes >= bytes) {
          return block;
        }
        give_back(block);
      }
    }
  }
  return nullptr;
}

void ScratchPool::give_back(Block* block) {
  const int64_t first = block->place;
  for (int64_t offset = 0; offset < kPlaces && block->is_kept; ++offset) {
    block->place = (first + offset) % kPlaces;
    Block* nothing = nullptr;
    // Another call may have put its block there meanwhile.
    if (places_[block->place].block.compare_exchange_strong(nothing, block,
                                                            std::memory_order_acq_rel)) {
      return;
    }
  }
  release(block);
}

void ScratchPool::release_larger_than(int64_t bytes) {
  for (Place& place : places_) {
    Block* const block = place.block.exchange(nullptr, std::memory_order_acq_rel);
    if (block != nullptr) {
      block->bytes > bytes ? release(block) : give_back(block);
    }
  }
}

// Not from torch's allocator, which would count the memory as a tensor's if the call is one of
// foo's. Not from the C library's either, which keeps freed memory per thread: 100 MB for 24
// threads.
ScratchPool::Block* ScratchPool::allocate(int64_t place, int64_t bytes) {
  void* const memory = mmap(nullptr, sizeof(Block) + bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "cannot allocate ", bytes, " bytes of scratch memory");
  bool is_kept = bytes <= kMostBytes && reserve(bytes);
  if (!is_kept && bytes <= kMostBytes) {
    release_larger_than(0);
    is_kept = reserve(bytes);
  }
  return new (memory) Block{bytes, place, 0, is_kept};
}

void ScratchPool::release(Block* block) {
  if (block->is_kept) {
    kept_bytes.fetch_sub(block->bytes, std::memory_order_relaxed);
  }
  munmap(block, sizeof(Block) + block->bytes);
}

}  // namespace foo
