// What an operator does to its arguments and its memory, from its schema or by a rule of its own.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "aten/operator_kinds.h"
#include "sanitizer/tracker.h"

namespace foo::sanitizer {

// The operator that this thread runs, and the memory that it takes meanwhile. What an operator is
// made of has no scope of its own.

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

  // Of an operator of a graph, whose results are where they were the last time.
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

// What an operator does to its arguments, read from its schema.

struct ArgumentUse {
  Reads reads = Reads::kNothing;
  bool is_read = false;
  bool is_written = false;
};

// Whose memory a result has: an argument's, as a view or because it is one that was written; or new
// memory.
enum class ResultUse { kView, kWritten, kNew };

struct OperatorUses {
  OperatorUses() = default;
  explicit OperatorUses(const c10::OperatorHandle& op);

  // What this call does to one of its arguments: with a factor 0 the values of self do not count.
  ArgumentUse use(size_t argument, c10::ArrayRef<c10::IValue> values) const;

  std::string name;
  std::vector<ArgumentUse> arguments;
  std::vector<ResultUse> results;
  // The factor of self, as addmm has it.
  std::optional<int> beta;
  // New memory is handed out as it is.
  bool leaves_memory_unwritten = false;
  aten::ImplicitSynchronization synchronization;
};

// Operators whose schemas do not tell what happens: copies, and changes of size.

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
