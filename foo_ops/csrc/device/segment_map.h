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
    const auto* position = static_cast<const char*>(address);
    auto after = segments_.upper_bound(position);
    if (after == segments_.begin()) return std::nullopt;
    const auto& [end, device] = std::prev(after)->second;
    return position < end ? std::optional(device) : std::nullopt;
  }

 private:
  ForkMutex mutex_;
  std::map<const char*, std::pair<const char*, c10::DeviceIndex>> segments_;
};

// The segments of all devices. It is never destroyed: storages may be freed after the static
// objects of this library.
SegmentMap& segment_map();

// The device in whose memory an address lies.
std::optional<c10::DeviceIndex> device_of_address(const void* address);

}  // namespace foo::device
