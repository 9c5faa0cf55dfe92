// Keeps memory from code that must not touch it, for the sanitizer: of the device, and pinned.

#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "launch/device_access.h"
#include "launch/fork_mutex.h"

namespace foo::device {

// Segments are closed as a whole: an access opens those that it needs, and the end of the last
// access that is under way closes them.
class MemoryProtection final : public AccessListener {
 public:
  // Closes all but memory that code of the CPU may be using. Not while other threads use the
  // device.
  void start();
  void stop();

  void begin_access() override;
  void end_access() override;
  bool open_for_access(const void* address) override;
  bool is_on() const { return access_listener.load(std::memory_order_acquire) != nullptr; }
  bool is_used() const { return accesses_.load(std::memory_order_acquire) > 0; }

  // Keeps memory open for code of the CPU that uses it, until it is let go as often, or forgotten
  // as it is free.
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

  // The segment of an address if it is open, or can be opened.
  OpenSegment* find_open(const void* address);
  OpenSegment* open(const void* address);
  void close_unused();
  void let_go(const void* address, uint32_t count);

  ForkMutex mutex_;
  std::atomic<int64_t> accesses_ = 0;
  std::map<const char*, OpenSegment> open_;
  std::unordered_map<const void*, uint32_t> holds_;
};

// It is never destroyed: storages may be freed after the static objects of this library.
MemoryProtection& memory_protection();

// Keeps memory open for code of the CPU, in whatever thread it runs, and for the system, which
// makes no fault of it but an error.
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

// Keeps pinned memory from the host while a copy uses it, for the sanitizer.

// Memory that a copy reads, so that the host may not write there, or writes, so that it may not
// read there either.
struct HostRange {
  uintptr_t begin;
  uintptr_t end;
  bool is_written;

  friend auto operator<=>(const HostRange&, const HostRange&) = default;
};

// By whole pages: who asks has to look whether a fault concerns the bytes of a copy.
class HostProtection {
 public:
  // These ranges and no others are protected from here on.
  void set(std::vector<HostRange> ranges);

  // Whether the page is protected from being written alone.
  bool is_readable(const void* address);
  // For the access that was interrupted, and all others until the ranges are set again.
  void open_page(const void* address);

 private:
  ForkMutex mutex_;
  std::vector<HostRange> ranges_;
  std::vector<HostRange> opened_;
};

// It is never destroyed, as other static objects have pinned memory.
HostProtection& host_protection();

// Faults of memory that the sanitizer protects. All others go to whoever had them before.

// Puts our handler before others, if it is not there already.
void catch_faults();
// Takes it away, unless another one has come before it.
void leave_faults();

}  // namespace foo::device
