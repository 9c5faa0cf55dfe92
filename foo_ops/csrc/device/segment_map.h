// A map from addresses to the segments of all devices.
#pragma once

#include <c10/core/Device.h>

#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "launch/fork_mutex.h"

namespace foo::device {

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
  // Begin and end of the segment in which an address lies.
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

// The segments of all devices. It is never destroyed: storages may be freed after the static
// objects of this library.
SegmentMap& segment_map();

// The device in whose memory an address lies.
std::optional<c10::DeviceIndex> device_of_address(const void* address);

}  // namespace foo::device
