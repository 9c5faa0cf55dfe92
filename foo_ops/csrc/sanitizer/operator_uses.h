// An operator's uses of its arguments and memory, from its schema or by a special rule.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "aten/operator_kinds.h"
#include "sanitizer/tracker.h"

namespace foo::sanitizer {

// The operator that this thread runs, and its allocations. Operators inside an operator have no
// scope of their own.
class OperatorScope {
 public:
  OperatorScope() { current_ = this; }
  ~OperatorScope() { current_ = nullptr; }
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

  static bool is_active() { return current_ != nullptr; }
  static void note_allocation(const void* memory) {
    if (is_active()) current_->allocations_.push_back(memory);
  }

  // Notes an allocation of a graph's operator, whose results reuse their memory.
  static void note_repeated_allocation(const void* memory) {
    if (is_active()) current_->repeated_.push_back(memory);
  }

  const std::vector<const void*>& allocations() const { return allocations_; }
  const std::vector<const void*>& repeated_allocations() const { return repeated_; }

 private:
  static inline thread_local OperatorScope* current_ = nullptr;

  std::vector<const void*> allocations_;
  std::vector<const void*> repeated_;
};

// Use of an argument, as the schema tells.
struct ArgumentUse {
  Reads reads = Reads::kNothing;
  bool is_read = false;
  bool is_written = false;
};

// Memory of a result: an argument's, since it is a view or a written argument, or new memory.
enum class ResultUse { kView, kWritten, kNew };

struct OperatorUses {
  OperatorUses() = default;
  explicit OperatorUses(const c10::OperatorHandle& op);

  // Returns the use of an argument in this call: with a factor 0 the values of self do not count.
  ArgumentUse use(size_t argument, c10::ArrayRef<c10::IValue> values) const;

  std::string name;
  std::vector<ArgumentUse> arguments;
  std::vector<ResultUse> results;
  // The position of self's factor, as in addmm.
  std::optional<int> beta;
  // New memory stays uninitialized.
  bool leaves_memory_unwritten = false;
  aten::ImplicitSynchronization synchronization;
};

// A copy from, to or between devices of foo, with CUDA's ordering. Its schema does not tell this.
class Copy {
 public:
  static std::optional<Copy> of(const OperatorUses& uses, c10::ArrayRef<c10::IValue> arguments);

  // Returns the stream of the source if that is on the device.
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

// A change of a storage's size: a storage that grew has its old bytes at the begin of new memory.
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
