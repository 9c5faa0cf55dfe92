// The figures of a device's memory, as torch counts them.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace foo::device {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

// The figures of one pool and of all, changed together.
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

}  // namespace foo::device
