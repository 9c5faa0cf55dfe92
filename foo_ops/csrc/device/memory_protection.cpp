#include "device/memory_protection.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <mutex>

#include "device/faults.h"
#include "device/segment_map.h"

namespace foo::device {
namespace {

void protect(const char* begin, size_t bytes, int protection) {
  mprotect(const_cast<char*>(begin), bytes, protection);
}

}  // namespace

MemoryProtection& memory_protection() {
  static auto* protection = [] {
    // Its mutex is held while that of the map is taken.
    segment_map();
    return new MemoryProtection();
  }();
  return *protection;
}

void MemoryProtection::start() {
  const std::lock_guard lock(mutex_);
  catch_faults();
  access_listener.store(this, std::memory_order_release);
  segment_map().for_each([&](const char* begin, const char* end) {
    open_.emplace(begin, OpenSegment{static_cast<size_t>(end - begin)});
  });
  close_unused();
}

void MemoryProtection::stop() {
  const std::lock_guard lock(mutex_);
  access_listener.store(nullptr, std::memory_order_release);
  segment_map().for_each([](const char* begin, const char* end) {
    protect(begin, static_cast<size_t>(end - begin), PROT_READ | PROT_WRITE);
  });
  open_.clear();
  holds_.clear();
  leave_faults();
}

void MemoryProtection::begin_access() {
  // Another handler may have come before ours, as that of Python's faulthandler does.
  if (accesses_.fetch_add(1, std::memory_order_acq_rel) == 0) catch_faults();
}

void MemoryProtection::end_access() {
  if (accesses_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const std::lock_guard lock(mutex_);
  close_unused();
}

void MemoryProtection::close_unused() {
  if (!is_on() || is_used()) return;
  for (auto each = open_.begin(); each != open_.end();) {
    const auto& [begin, segment] = *each;
    if (segment.holds == 0) {
      protect(begin, segment.bytes, PROT_NONE);
      each = open_.erase(each);
    } else {
      ++each;
    }
  }
}

MemoryProtection::OpenSegment* MemoryProtection::find_open(const void* address) {
  const auto* position = static_cast<const char*>(address);
  const auto after = open_.upper_bound(position);
  if (after == open_.begin()) return nullptr;
  auto& [begin, segment] = *std::prev(after);
  return position < begin + segment.bytes ? &segment : nullptr;
}

MemoryProtection::OpenSegment* MemoryProtection::open(const void* address) {
  if (OpenSegment* const segment = find_open(address)) return segment;
  const auto range = segment_map().range_of(address);
  if (!range.has_value()) return nullptr;
  const auto [begin, end] = *range;
  const auto bytes = static_cast<size_t>(end - begin);
  protect(begin, bytes, PROT_READ | PROT_WRITE);
  return &open_.emplace(begin, OpenSegment{bytes}).first->second;
}

bool MemoryProtection::open_for_access(const void* address) {
  const std::lock_guard lock(mutex_);
  // Without an access, somebody may have opened it since the fault.
  return (is_used() ? open(address) : find_open(address)) != nullptr;
}

void MemoryProtection::hold_open(const void* address) {
  const std::lock_guard lock(mutex_);
  OpenSegment* const segment = open(address);
  if (segment == nullptr) return;
  ++segment->holds;
  ++holds_[address];
}

void MemoryProtection::let_go(const void* address, uint32_t count) {
  const std::lock_guard lock(mutex_);
  const auto held = holds_.find(address);
  if (held == holds_.end()) return;
  count = std::min(count, held->second);
  if (OpenSegment* const segment = find_open(address)) segment->holds -= count;
  held->second -= count;
  if (held->second == 0) holds_.erase(held);
  close_unused();
}

void MemoryProtection::let_go(const void* address) {
  let_go(address, 1);
}

void MemoryProtection::forget(const void* address) {
  let_go(address, std::numeric_limits<uint32_t>::max());
}

void MemoryProtection::segment_added(const char* begin, size_t bytes) {
  if (!is_on()) return;
  const std::lock_guard lock(mutex_);
  open_.emplace(begin, OpenSegment{bytes});
}

void MemoryProtection::segment_removed(const char* begin) {
  if (!is_on()) return;
  const std::lock_guard lock(mutex_);
  open_.erase(begin);
}

}  // namespace foo::device
