#include "launch/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "launch/fork_mutex.h"

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

size_t physical_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

struct Block {
  char* memory;
  size_t bytes;
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
    Block block{static_cast<char*>(memory), 0};
    {
      const std::lock_guard lock(mutex_);
      const auto found = used_.find(memory);
      block.bytes = found->second;
      used_.erase(found);
    }
#ifdef MADV_FREE
    // Takes 1 % of the time of writing 128 MB, and no page of it is cleared again.
    if (block.bytes <= most_) madvise(block.memory, block.bytes, MADV_FREE);
#endif
    unmap(keep(block));
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

  // Returns the blocks for which there is no room, those that have waited longest first.
  std::vector<Block> keep(const Block& block) {
    const std::lock_guard lock(mutex_);
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

}  // namespace

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
