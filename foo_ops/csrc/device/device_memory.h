// The memory of one device: blocks for tensors, in segments from the system, with statistics; and
// private pools, with the threads and streams that allocate from them.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/heap.h"
#include "launch/fork_mutex.h"
#include "launch/memory.h"

namespace foo::device {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

using PoolId = c10::MempoolId_t;

inline constexpr PoolId kCommonPool = {0, 0};

struct PoolOptions {
  // Whether the pool also serves requests for which the common pool has no memory.
  bool use_on_oom = false;
  // Whether each block has its own segment.
  bool no_split = false;
};

// Returns an id as torch numbers them: the first number is for pools that a capture makes for
// itself, the second for others.
PoolId new_pool_id(bool is_for_capture);

// Serves this thread's allocations on a device, or those with the stream as the current one, from
// the pool. The caller must be a user of the pool meanwhile.
void begin_pool(c10::DeviceIndex index, PoolId id);
// Ends the last pool that began; raises if that is another one.
void end_pool(c10::DeviceIndex index, PoolId id);

void begin_pool(c10::Stream stream, PoolId id);
void end_pool(c10::Stream stream);

// Returns the pool for an allocation of this thread.
PoolId chosen_pool(c10::DeviceIndex index);

// Statistics of one pool and of all pools, updated together. torch defines what they count.
class PoolStat {
 public:
  PoolStat(StatArray& stat, StatType pool) : stat_(stat), pool_(static_cast<size_t>(pool)) {}
  void increase(size_t amount) {
    stat_[kAll].increase(amount);
    stat_[pool_].increase(amount);
  }
  void decrease(size_t amount) {
    stat_[kAll].decrease(amount);
    stat_[pool_].decrease(amount);
  }
  void change(int64_t amount) { amount >= 0 ? increase(amount) : decrease(-amount); }

 private:
  static constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);
  StatArray& stat_;
  size_t pool_;
};

template <typename Function>
void for_each_figure(DeviceStats& statistics, Function function) {
  for (StatArray* statistic :
       {&statistics.allocation, &statistics.segment, &statistics.active, &statistics.inactive_split,
        &statistics.allocated_bytes, &statistics.reserved_bytes, &statistics.active_bytes,
        &statistics.inactive_split_bytes, &statistics.requested_bytes}) {
    for (Stat& figure : *statistic) function(figure);
  }
}

inline int64_t current_of(const StatArray& statistic) {
  return statistic[static_cast<size_t>(StatType::AGGREGATE)].current;
}

// Size of a page, the smallest unit that can be protected.
size_t page_bytes();

size_t physical_memory();

// Returns the bytes that a program can get without swapping. Most of them may hold cached files,
// which the system drops when memory is needed, so free pages alone can be a hundredth.
size_t available_memory();

// Maps memory from the system, aligned to huge pages, or returns null.
char* map_memory(size_t bytes);

class DeviceMemory {
  using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;
  using SegmentInfo = c10::CachingDeviceAllocator::SegmentInfo;
  using StatType = c10::CachingAllocator::StatType;

 public:
  void set_index(c10::DeviceIndex index) { index_ = index; }

  // `is_for_host`: for a CPU kernel, until a foo storage shares the memory.
  void* allocate(size_t bytes, bool is_for_host);
  // Call only inside a DeviceAccess.
  void free(Block* block);
  void count_adopted(void* address, size_t bytes, int64_t sign);
  // Empties the common pool, and the pools without users.
  void empty_cache();
  void empty_cache_of(PoolId id);
  // A pool exists as long as it has users, and then until its last block is free. The first user
  // sets its options.
  void add_user(PoolId id, PoolOptions options);
  void remove_user(PoolId id);
  int64_t count_users(PoolId id);
  DeviceStats statistics();
  void reset_accumulated();
  void reset_peak();
  std::pair<size_t, size_t> free_and_total();
  void set_fraction(double fraction);
  double fraction();
  void append_snapshot(std::vector<SegmentInfo>& segments);
  // Returns memory that CPU code may be using.
  std::vector<const void*> used_by_host();

 private:
  struct Pool : Heap {
    Pool(StatType its_type, size_t its_segments, size_t smallest_rest)
        : Heap(smallest_rest), type(its_type), segment_bytes(its_segments) {}

    StatType type;
    size_t segment_bytes;
    // The heap's figures when they were last added to the statistics.
    SplitFigures counted;
  };

  struct Pools {
    explicit Pools(PoolId its_id, PoolOptions its_options = {});
    Pool& pool_for(size_t bytes);
    bool has_segments() const;

    PoolId id;
    PoolOptions options;
    int64_t users = 0;
    Pool small, large;
  };

  // Totals that torch's profiler gets after each change.
  struct Totals {
    int64_t allocated = 0;
    int64_t reserved = 0;
  };

  static Pool& pool_of(const Block& block);
  template <typename Function>
  void for_each_pools(Function function);
  size_t total_memory() const;
  size_t allowed_bytes() const;
  size_t reserved_bytes() const;
  Totals current_totals() const;
  void report(void* address, int64_t bytes, const Totals& totals) const;
  // Takes a free block, else one from the system, else from the system after all cached memory was
  // returned, else from pools with use_on_oom.
  Block* take(Pool& pool, size_t bytes);
  Block* take_from_others(const Pool& full, size_t bytes);
  // Reserves a segment of the pool's usual size, or if the limit forbids it, one that just
  // suffices.
  bool reserve(Pool& pool, size_t bytes);
  bool reserve_segment(Pool& pool, size_t bytes);
  void release_unused_segments();
  void release_unused_segments(Pools& pools);
  // Counts a block that is taken (1) or returned (-1).
  void count_block(const Pool& pool, const Block& block, int64_t sign);
  void count_splits(Pool& pool);
  std::string out_of_memory(size_t bytes);
  SegmentInfo describe(const Segment& segment, const Pool& pool, PoolId id) const;

  ForkMutex mutex_;
  c10::DeviceIndex index_ = 0;
  double fraction_ = 1;
  DeviceStats statistics_;
  Pools common_{kCommonPool};
  std::map<PoolId, std::unique_ptr<Pools>> private_;
};

// Never destroyed: storages may be freed after the static objects of this library.
DeviceMemory& memory_of(c10::DeviceIndex index);

}  // namespace foo::device
