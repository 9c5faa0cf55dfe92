#include "launch/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "launch/fork_mutex.h"
#include "launch/lasting.h"

namespace foo {

std::optional<size_t> bytes_of_variable(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  const std::string_view all = text;
  size_t number = 0;
  const auto [end, error] = std::from_chars(all.data(), all.data() + all.size(), number);
  const std::string_view unit = all.substr(end - all.data());
  const size_t exponent = std::string_view(" KMG").find(unit.empty() ? ' ' : unit.front());
  const bool is_known = error == std::errc() && unit.size() <= 1 && exponent < 4 && unit != " ";
  TORCH_CHECK_VALUE(is_known && number <= (size_t{1} << 62 >> 10 * exponent), name,
                    " must be a number of bytes, such as 1000000, 512M or 2G, got '", text, "'");
  return number << 10 * exponent;
}

namespace {

constexpr size_t kPartOfMachine = 16;
// The C library keeps up to as much of freed memory at the end of its heap.
constexpr size_t kHotBytes = size_t{64} << 20;

size_t physical_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

struct Block {
  char* memory;
  size_t bytes;
  // Whether Linux may take the pages.
  bool is_advised = false;
};

// Returns whole huge pages, which nobody has written yet, or nullptr.
char* map(size_t bytes) {
  void* const all =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(all);
  const size_t before = -reinterpret_cast<uintptr_t>(begin) % kHugePage;
  if (before > 0) munmap(begin, before);
  if (before < kHugePage) munmap(begin + before + bytes, kHugePage - before);
#ifdef MADV_HUGEPAGE
  // A system without huge pages refuses, and the memory stays as it is.
  madvise(begin + before, bytes, MADV_HUGEPAGE);
#endif
  return begin + before;
}

void unmap(const std::vector<Block>& blocks) {
  for (const Block& block : blocks) munmap(block.memory, block.bytes);
}

// Blocks of results. Never destroyed: tensors outlive static objects.
class ResultMemory {
 public:
  void* take(size_t bytes) {
    const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    Block block = take_waiting(rounded);
    if (block.memory == nullptr) block = {map(rounded), rounded};
    if (block.memory == nullptr) {
      release();
      block.memory = map(rounded);
    }
    if (block.memory == nullptr) return nullptr;
    const std::lock_guard lock(mutex_);
    used_[block.memory] = block.bytes;
    return block.memory;
  }

  void give_back(void* memory) {
    std::vector<Block> released;
    {
      const std::lock_guard lock(mutex_);
      const auto found = used_.find(memory);
      const Block block{static_cast<char*>(memory), found->second};
      used_.erase(found);
      released = keep(block);
      advise();
    }
    unmap(released);
  }

  void release() {
    std::vector<Block> released;
    {
      const std::lock_guard lock(mutex_);
      released.swap(waiting_);
      waiting_bytes_ = 0;
    }
    unmap(released);
  }

  ResultMemoryFigures figures() {
    const std::lock_guard lock(mutex_);
    return {waiting_bytes_, most_};
  }

 private:
  // Takes the smallest block that is large enough, but not by a fourth; of equal ones the last,
  // which the caches may still hold.
  Block take_waiting(size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto best = waiting_.end();
    for (auto each = waiting_.begin(); each != waiting_.end(); ++each) {
      const bool fits = bytes <= each->bytes && each->bytes - bytes <= bytes / 4;
      if (fits && (best == waiting_.end() || each->bytes <= best->bytes)) best = each;
    }
    if (best == waiting_.end()) return {nullptr, 0};
    const Block block = *best;
    waiting_.erase(best);
    waiting_bytes_ -= block.bytes;
    return block;
  }

  // Lets Linux take the pages of all waiting blocks but the last ones, which are needed again soon:
  // every processor would have to hear of it, 0.1 ms for 4 MB on two. The lock is held, since a
  // result that is written meanwhile would be lost. It takes 1 % of the time of writing 128 MB, and
  // no page is cleared again.
  void advise() {
#ifdef MADV_FREE
    size_t hot = 0;
    for (auto block = waiting_.rbegin(); block != waiting_.rend(); ++block) {
      // All that have waited longer are advised, too.
      if (block->is_advised) return;
      hot += block->bytes;
      if (hot <= kHotBytes) continue;
      madvise(block->memory, block->bytes, MADV_FREE);
      block->is_advised = true;
    }
#endif
  }

  // Returns the blocks for which there is no room, those that have waited longest first.
  std::vector<Block> keep(const Block& block) {
    waiting_.push_back(block);
    waiting_bytes_ += block.bytes;
    auto end = waiting_.begin();
    for (; waiting_bytes_ > most_; ++end) waiting_bytes_ -= end->bytes;
    std::vector<Block> released(waiting_.begin(), end);
    waiting_.erase(waiting_.begin(), end);
    return released;
  }

  const size_t most_ =
      bytes_of_variable("FOO_RESULT_MEMORY").value_or(physical_bytes() / kPartOfMachine);
  ForkMutex mutex_;
  std::unordered_map<void*, size_t> used_;
  // The one that has waited longest is first.
  std::vector<Block> waiting_;
  size_t waiting_bytes_ = 0;
};

ResultMemory& result_memory() {
  static auto* memory = new ResultMemory();
  return *memory;
}

void free_result(void* memory) {
  c10::profiledCPUMemoryReporter().Delete(memory);
  result_memory().give_back(memory);
}

// Blocks of small results: powers of two, cut from slabs. Freed blocks are a list, linked through
// their own memory. Blocks may be freed by other threads than those that use them: of long lists a
// part goes to all threads.
constexpr size_t kSlab = size_t{64} << 10;
constexpr int kLeastExponent = 6;
constexpr size_t kSizes = 10;
static_assert(kSmallResult == size_t{1} << (kLeastExponent + kSizes - 1));
// Slabs of each size, so that one leaves room to the others: 6.5 MB.
constexpr size_t kSlabsOfSize = 104, kSlabs = kSizes * kSlabsOfSize;
// Most bytes of a size that a thread keeps.
constexpr size_t kKeptBytes = 4 * kSlab;

struct FreeBlock {
  FreeBlock* next;
};

struct FreeBlocks {
  FreeBlock* first;
  size_t count;

  void push(void* memory) {
    first = new (memory) FreeBlock{first};
    ++count;
  }
  void* pop() {
    FreeBlock* const block = first;
    if (block == nullptr) return nullptr;
    first = block->next;
    --count;
    return block;
  }
};

// A list for each size.
using Sizes = std::array<FreeBlocks, kSizes>;

// Without a destructor, so that the last tensors of a thread can still be freed.
constinit thread_local Sizes blocks_of_thread{};
constinit thread_local bool has_ended = false;

size_t size_index(size_t bytes) {
  const size_t rounded = std::max(bytes, size_t{1} << kLeastExponent);
  return std::bit_width(rounded - 1) - kLeastExponent;
}

size_t block_bytes(size_t size) {
  return size_t{1} << (size + kLeastExponent);
}

// Lets this thread's blocks go to all threads when it ends.
void end_with_thread();

// Never destroyed: tensors outlive static objects.
class SmallBlocks {
 public:
  SmallBlocks() {
    void* const all = mmap(nullptr, kSlabs * kSlab, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all != MAP_FAILED) begin_ = static_cast<char*>(all);
  }

  bool owns(const void* memory) const {
    const auto place = reinterpret_cast<uintptr_t>(memory) - reinterpret_cast<uintptr_t>(begin_);
    return begin_ != nullptr && place < kSlabs * kSlab;
  }

  void* take(size_t size) {
    FreeBlocks& blocks = blocks_of_thread[size];
    if (blocks.first == nullptr) fill(blocks, size);
    return blocks.pop();
  }

  void give_back(void* memory) {
    const size_t size = (static_cast<char*>(memory) - begin_) / (kSlabsOfSize * kSlab);
    if (has_ended) {
      const std::lock_guard lock(mutex_);
      shared_[size].push(memory);
      return;
    }
    FreeBlocks& blocks = blocks_of_thread[size];
    if (blocks.first == nullptr) end_with_thread();
    blocks.push(memory);
    const size_t most = kKeptBytes / block_bytes(size);
    if (blocks.count > most) share(blocks, size, most / 2);
  }

  void end_thread() {
    has_ended = true;
    for (size_t size = 0; size < kSizes; ++size)
      share(blocks_of_thread[size], size, blocks_of_thread[size].count);
  }

 private:
  void fill(FreeBlocks& blocks, size_t size) {
    if (begin_ == nullptr || has_ended) return;
    end_with_thread();
    const std::lock_guard lock(mutex_);
    const size_t count = kSlab / block_bytes(size);
    while (blocks.count < count && shared_[size].first != nullptr) {
      blocks.push(shared_[size].pop());
    }
    if (blocks.first == nullptr && used_slabs_[size] < kSlabsOfSize) cut_slab(blocks, size);
  }

  void cut_slab(FreeBlocks& blocks, size_t size) {
    char* const slab = begin_ + (size * kSlabsOfSize + used_slabs_[size]++) * kSlab;
    for (size_t place = 0; place < kSlab; place += block_bytes(size)) blocks.push(slab + place);
  }

  void share(FreeBlocks& blocks, size_t size, size_t count) {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) shared_[size].push(blocks.pop());
  }

  char* begin_ = nullptr;
  ForkMutex mutex_;
  Sizes shared_{};
  std::array<size_t, kSizes> used_slabs_{};
};

SmallBlocks& small_blocks() {
  static auto* blocks = new SmallBlocks();
  return *blocks;
}

// Made when the library is loaded: freeing memory must not make a mutex.
const SmallBlocks& made_with_library = small_blocks();

void end_with_thread() {
  struct End {
    ~End() { small_blocks().end_thread(); }
  };
  thread_local const End end;
}

void free_small(void* memory) {
  c10::profiledCPUMemoryReporter().Delete(memory);
  small_blocks().give_back(memory);
}

}  // namespace

c10::DataPtr allocate_small_result(size_t bytes) {
  void* const memory = LastingResults::lives() ? nullptr : small_blocks().take(size_index(bytes));
  if (memory != nullptr) c10::profiledCPUMemoryReporter().New(memory, bytes);
  return {memory, memory, &free_small, c10::Device(c10::kCPU)};
}

bool free_small_result(void* memory) {
  if (!small_blocks().owns(memory)) return false;
  free_small(memory);
  return true;
}

c10::DataPtr allocate_result(size_t bytes) {
  void* const memory = result_memory().take(bytes);
  if (memory != nullptr) c10::profiledCPUMemoryReporter().New(memory, bytes);
  return {memory, memory, &free_result, c10::Device(c10::kCPU)};
}

ResultMemoryFigures result_memory_figures() {
  return result_memory().figures();
}

void release_result_memory() {
  result_memory().release();
}

}  // namespace foo
