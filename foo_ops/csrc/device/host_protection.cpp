#include "device/host_protection.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

#include "device/heap.h"
#include "device/system_memory.h"

namespace foo::device {
namespace {

void protect(const HostRange& range, int protection) {
  mprotect(reinterpret_cast<void*>(range.begin), range.end - range.begin, protection);
}

HostRange whole_pages(const HostRange& range) {
  return {range.begin / page_bytes() * page_bytes(), round_up(range.end, page_bytes()),
          range.is_written};
}

// Those of the one that are not in the other; both are sorted.
std::vector<HostRange> difference(const std::vector<HostRange>& one,
                                  const std::vector<HostRange>& other) {
  std::vector<HostRange> result;
  std::set_difference(one.begin(), one.end(), other.begin(), other.end(),
                      std::back_inserter(result));
  return result;
}

bool overlap(const HostRange& one, const HostRange& other) {
  return one.begin < other.end && other.begin < one.end;
}

}  // namespace

HostProtection& host_protection() {
  static auto* protection = new HostProtection();
  return *protection;
}

void HostProtection::set(std::vector<HostRange> ranges) {
  for (HostRange& range : ranges) range = whole_pages(range);
  std::sort(ranges.begin(), ranges.end());
  const std::lock_guard lock(mutex_);
  const std::vector<HostRange> removed = difference(ranges_, ranges);
  for (const HostRange& range : removed) protect(range, PROT_READ | PROT_WRITE);
  std::vector<HostRange> changed = std::exchange(opened_, {});
  changed.insert(changed.end(), removed.begin(), removed.end());
  const std::vector<HostRange> added = difference(ranges, ranges_);
  changed.insert(changed.end(), added.begin(), added.end());
  const auto is_touched = [&](const HostRange& range) {
    return std::any_of(changed.begin(), changed.end(),
                       [&](const HostRange& each) { return overlap(each, range); });
  };
  // A page that one copy reads and another one writes is closed altogether.
  for (const bool is_written : {false, true}) {
    for (const HostRange& range : ranges) {
      if (range.is_written != is_written || !is_touched(range)) continue;
      protect(range, is_written ? PROT_NONE : PROT_READ);
    }
  }
  ranges_ = std::move(ranges);
}

bool HostProtection::is_readable(const void* address) {
  const auto position = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  return std::none_of(ranges_.begin(), ranges_.end(), [&](const HostRange& range) {
    return range.is_written && range.begin <= position && position < range.end;
  });
}

void HostProtection::open_page(const void* address) {
  const auto position = reinterpret_cast<uintptr_t>(address);
  const HostRange page = whole_pages({position, position + 1, false});
  const std::lock_guard lock(mutex_);
  protect(page, PROT_READ | PROT_WRITE);
  opened_.push_back(page);
}

}  // namespace foo::device
