// Keeps memory of the device from code that is no kernel, for the sanitizer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>

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

}  // namespace foo::device
