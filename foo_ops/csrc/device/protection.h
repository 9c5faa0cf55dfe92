// Protects memory, of the device and pinned, from code that must not touch it, for the sanitizer.

#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "launch/fork_mutex.h"
#include "launch/memory.h"

namespace foo::device {

// Closes and opens whole segments: an access opens those that it needs, and the end of the last
// concurrent access closes them.
class MemoryProtection final : public AccessListener {
 public:
  // Closes all memory except what CPU code may be using. Other threads must not use the device
  // meanwhile.
  void start();
  void stop();

  void begin_access() override;
  void end_access() override;
  bool open_for_access(const void* address) override;
  bool is_on() const { return access_listener.load(std::memory_order_acquire) != nullptr; }
  bool is_used() const { return accesses_.load(std::memory_order_acquire) > 0; }

  // Keeps memory open for CPU code that uses it, until it is let go equally often, or forgotten
  // because it is free.
  void hold_open(const void* address);
  void let_go(const void* address);
  void forget(const void* address);

  void segment_added(const char* begin, size_t bytes);
  void segment_removed(const char* begin);

 private:
  struct OpenSegment {
    size_t bytes;
    uint32_t holds = 0;
  };

  // Returns the segment of an address if it is open, or can be opened.
  OpenSegment* find_open(const void* address);
  OpenSegment* open(const void* address);
  void close_unused();
  void let_go(const void* address, uint32_t count);

  ForkMutex mutex_;
  std::atomic<int64_t> accesses_ = 0;
  std::map<const char*, OpenSegment> open_;
  std::unordered_map<const void*, uint32_t> holds_;
};

// Never destroyed: storages may be freed after the static objects of this library.
MemoryProtection& memory_protection();

// Keeps memory open for CPU code on any thread, and for system calls, which report an error instead
// of a fault.
class HeldOpen {
 public:
  explicit HeldOpen(const void* address)
      : address_(access_listener.load(std::memory_order_acquire) != nullptr ? address : nullptr) {
    if (address_ != nullptr) [[unlikely]]
      memory_protection().hold_open(address_);
  }
  ~HeldOpen() {
    if (address_ != nullptr) [[unlikely]]
      memory_protection().let_go(address_);
  }
  HeldOpen(const HeldOpen&) = delete;
  HeldOpen& operator=(const HeldOpen&) = delete;

 private:
  const void* address_;
};

// Memory in use by a copy. If the copy reads it, the host may not write; if the copy writes it, the
// host may not read either.
struct HostRange {
  uintptr_t begin;
  uintptr_t end;
  bool is_written;

  friend auto operator<=>(const HostRange&, const HostRange&) = default;
};

// Protects pinned memory from the host while a copy uses it, in whole pages: callers must check
// whether a fault concerns the bytes of a copy.
class HostProtection {
 public:
  // Protects these ranges and no others.
  void set(std::vector<HostRange> ranges);

  // Whether the page is protected only from writes.
  bool is_readable(const void* address);
  // Opens the page for the interrupted access, and all others until the ranges are set again.
  void open_page(const void* address);

 private:
  ForkMutex mutex_;
  std::vector<HostRange> ranges_;
  std::vector<HostRange> opened_;
};

// Never destroyed: other static objects have pinned memory.
HostProtection& host_protection();

// Installs our fault handler over others, unless it is there already. It passes on faults of memory
// that the sanitizer does not protect.
void catch_faults();
// Removes the handler, unless another one was installed over it.
void leave_faults();

}  // namespace foo::device
