// Keeps pinned memory from the host while a copy uses it, for the sanitizer.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "launch/fork_mutex.h"

namespace foo::device {

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

}  // namespace foo::device
