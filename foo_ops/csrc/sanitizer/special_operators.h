// Operators whose schemas do not tell what happens: copies, and changes of size.
#pragma once

#include <optional>

#include "sanitizer/operator_uses.h"
#include "sanitizer/tracker.h"

namespace foo::sanitizer {

// A copy from, to or between devices of foo, with the order that CUDA gives it.
class Copy {
 public:
  static std::optional<Copy> of(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments);

  // The copy runs on the stream of its source, where that is on the device.
  c10::Stream stream() const;
  void begin(Tracker& tracker, const LaunchPtr& launch, Findings& findings) const;
  void end(Tracker& tracker, const LaunchPtr& launch) const;

 private:
  Copy(at::Tensor source, at::Tensor destination, bool non_blocking);

  bool waits() const;

  at::Tensor source_;
  at::Tensor destination_;
  bool non_blocking_;
};

// A storage that grew has its old bytes at the begin of new memory.
class Resize {
 public:
  static std::optional<Resize> of(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments);

  void end(Tracker& tracker) const;

 private:
  explicit Resize(c10::Storage storage);

  c10::Storage storage_;
  const void* memory_;
  size_t bytes_;
};

}  // namespace foo::sanitizer
