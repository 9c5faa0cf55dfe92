#include "device/protection.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <limits>
#include <mutex>
#include <utility>

#include "device/device_memory.h"
#include "device/heap.h"
#include "device/observer.h"
#include "device/pinned_memory.h"

namespace foo::device {
namespace {

void protect(const char* begin, size_t bytes, int protection) {
  mprotect(const_cast<char*>(begin), bytes, protection);
}

}  // namespace

MemoryProtection& memory_protection() {
  static auto* protection = [] {
    // Make the map first: its mutex is locked while ours is held.
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
  // Another handler may have been installed over ours, as by Python's faulthandler.
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
  // Without an access, another thread may have opened it since the fault.
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

namespace {

void protect(const HostRange& range, int protection) {
  mprotect(reinterpret_cast<void*>(range.begin), range.end - range.begin, protection);
}

HostRange whole_pages(const HostRange& range) {
  return {range.begin / page_bytes() * page_bytes(), round_up(range.end, page_bytes()),
          range.is_written};
}

// Returns the ranges of `one` that are not in `other`; both are sorted.
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
  // Protect written ranges last: a page that one copy reads and another writes allows no access.
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

namespace {

struct sigaction previous;
// Address of the last fault that was passed to another handler; initially the address of this
// variable, which never faults.
std::atomic<const void*> passed_on = &passed_on;

// Whether the access is a write. If the processor does not tell, it is one if the page can be read.
bool is_write([[maybe_unused]] const void* address, [[maybe_unused]] const void* context) {
#if defined(__x86_64__)
  constexpr greg_t kWrite = 2;
  return (static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & kWrite) != 0;
#else
  return host_protection().is_readable(address);
#endif
}

// Ends the process as if there were no handler.
void end_process(int signal_number) {
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

// Unblocks the signal until the handler returns. A finding may run Python, or garbage collection,
// which may use the device; a fault of a thread that blocks the signal would end the process
// without a message.
void unblock_faults() {
  sigset_t faults;
  sigemptyset(&faults);
  sigaddset(&faults, SIGSEGV);
  pthread_sigmask(SIG_UNBLOCK, &faults, nullptr);
}

// The interrupted code reads or writes memory, so it holds no lock of ours, of malloc or of Python,
// except perhaps the GIL.
bool resolve(const void* address, const void* context) {
  if (!memory_protection().is_on()) return false;
  if (memory_protection().open_for_access(address)) return true;
  const bool is_of_device = device_of_address(address).has_value();
  if (!is_of_device && !is_pinned(address)) return false;
  // Kernels copy from and to pinned memory; their schemas tell whether they may.
  if (is_of_device || !memory_protection().is_used()) {
    unblock_faults();
    observe(
        [&](Observer& observer) { observer.touched_by_host(address, is_write(address, context)); });
  }
  if (is_of_device) {
    end_process(SIGSEGV);
  } else {
    host_protection().open_page(address);
  }
  return true;
}

void pass_on(int signal_number, siginfo_t* information, void* context) {
  // A handler that delegates to the previous one comes back here, and so does one that lets the
  // same code fail again.
  const void* const last = passed_on.exchange(information->si_addr);
  const bool is_back =
      last != &passed_on && (information->si_code <= 0 || information->si_addr == last);
  const bool is_default = previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN;
  if (is_default || is_back) return end_process(signal_number);
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal_number, information, context);
  } else {
    previous.sa_handler(signal_number);
  }
}

void on_fault(int signal_number, siginfo_t* information, void* context) {
  const int error = errno;
  const bool is_resolved =
      information->si_code == SEGV_ACCERR && resolve(information->si_addr, context);
  if (!is_resolved) pass_on(signal_number, information, context);
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &on_fault;
}

}  // namespace

void catch_faults() {
  struct sigaction current;
  sigaction(SIGSEGV, nullptr, &current);
  if (is_ours(current)) return;
  struct sigaction ours{};
  ours.sa_sigaction = &on_fault;
  // On the thread's own stack: an alternative stack, such as that of Python's faulthandler, is too
  // small to run Python.
  ours.sa_flags = SA_SIGINFO;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, &previous);
}

void leave_faults() {
  struct sigaction current;
  sigaction(SIGSEGV, nullptr, &current);
  if (is_ours(current)) sigaction(SIGSEGV, &previous, nullptr);
}

}  // namespace foo::device
