// Blocks of host memory in size classes, and a map from addresses to their segments.

#pragma once

#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "launch/fork_mutex.h"

namespace foo::device {

// Map from addresses to the segments of all devices.
class SegmentMap {
 public:
  void add(const char* begin, size_t bytes, c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    segments_[begin] = {begin + bytes, device};
  }
  void remove(const char* begin) {
    const std::lock_guard lock(mutex_);
    segments_.erase(begin);
  }
  std::optional<c10::DeviceIndex> find(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto segment = segment_of(address);
    return segment == segments_.end() ? std::nullopt : std::optional(segment->second.second);
  }
  // Returns begin and end of the segment that contains an address.
  std::optional<std::pair<const char*, const char*>> range_of(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto segment = segment_of(address);
    if (segment == segments_.end()) return std::nullopt;
    return std::pair(segment->first, segment->second.first);
  }
  template <typename Function>
  void for_each(Function function) {
    const std::lock_guard lock(mutex_);
    for (const auto& [begin, segment] : segments_) function(begin, segment.first);
  }

 private:
  using Segments = std::map<const char*, std::pair<const char*, c10::DeviceIndex>>;

  Segments::const_iterator segment_of(const void* address) const {
    const auto* position = static_cast<const char*>(address);
    const auto after = segments_.upper_bound(position);
    if (after == segments_.begin()) return segments_.end();
    const auto segment = std::prev(after);
    return position < segment->second.first ? segment : segments_.end();
  }

  ForkMutex mutex_;
  Segments segments_;
};

// Segments of all devices. Never destroyed: storages may be freed after the static objects of this
// library.
SegmentMap& segment_map();

// Returns the device whose memory contains an address.
std::optional<c10::DeviceIndex> device_of_address(const void* address);

// Blocks of host memory in size classes: found by class, split, merged with free neighbours.
//
// The free lists form a two-level segregated fit: a class is one of sixteen parts of a power of
// two, and bit sets tell which classes have blocks, so that finding one takes no loop over sizes.
// Independent of torch; takes no lock.

// Also the width of a cache line and of an AVX-512 register.
inline constexpr size_t kAlignment = 64;

constexpr size_t round_up(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

class Heap;
struct Block;

// One mapping from the system. Its blocks are adjacent.
struct Segment {
  Heap* heap;
  char* begin;
  size_t bytes;
  int8_t device;
  Segment* next = nullptr;
  Segment* previous = nullptr;

  Block* first_block() const;
};

// Header in front of the memory, so that a block is found from its memory's address: c10's
// raw_deleter and copy-on-write storages have nothing else.
struct alignas(kAlignment) Block {
  Segment* segment;
  Block* previous;  // the previous block in the segment
  Block* next_free;
  Block* previous_free;
  size_t bytes;  // of memory, without this header
  size_t requested_bytes;
  bool is_free;
  // Whether a CPU kernel took the block, and it has not become foo memory.
  bool is_of_host = false;
  // Storages that share the memory. They count themselves; the heap ignores this.
  std::atomic<uint32_t> owners = 0;

  static Block* of(void* memory) { return static_cast<Block*>(memory) - 1; }
  char* memory() { return reinterpret_cast<char*>(this + 1); }
  // Returns the next block in the segment, or null.
  Block* next();
  // CPU code may keep memory that it took, or that it shares with a foo storage.
  bool may_be_used_by_host() const {
    return is_of_host || owners.load(std::memory_order_acquire) > 1;
  }
  bool fills_segment() { return previous == nullptr && next() == nullptr; }
};
static_assert(sizeof(Block) == kAlignment);

inline Block* Segment::first_block() const {
  return reinterpret_cast<Block*>(begin);
}

// Number and bytes of free blocks in segments with several blocks.
struct SplitFigures {
  int64_t blocks = 0;
  int64_t bytes = 0;
};

class Heap {
 public:
  // The rest of a block becomes a separate block from `smallest_rest` bytes of memory on.
  explicit Heap(size_t smallest_rest) : smallest_rest_(smallest_rest) {}

  // Takes a block with at least this much memory; null if no free one is large enough.
  Block* take(size_t bytes);
  void give_back(Block* block);

  // Adds memory from the system as one free block. It must be aligned to kAlignment.
  void add(char* begin, size_t bytes, int8_t device);
  // Removes a segment without used blocks; null if there is none.
  Segment* remove_unused_segment();

  Segment* first_segment() const { return segments_; }
  const SplitFigures& split_figures() const { return split_figures_; }

 private:
  static constexpr int kSubclassBits = 4;
  static constexpr int kSubclasses = 1 << kSubclassBits;
  static constexpr int kClasses = 48;

  struct SizeClass {
    int first;
    int second;
  };

  static SizeClass class_of(size_t bytes);
  Block* find(size_t bytes) const;
  void insert(Block* block);
  void remove(Block* block);
  void split(Block* block, size_t bytes);
  void merge_with_next(Block* block);
  void count_split(Block* block, int64_t sign);

  size_t smallest_rest_;
  Segment* segments_ = nullptr;
  SplitFigures split_figures_;
  uint64_t classes_with_blocks_ = 0;
  std::array<uint32_t, kClasses> subclasses_with_blocks_{};
  std::array<std::array<Block*, kSubclasses>, kClasses> lists_{};
};

}  // namespace foo::device
