// The operator that this thread runs, and the memory that it takes meanwhile. What an operator is
// made of has no scope of its own.
#pragma once

#include <vector>

namespace foo::sanitizer {

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

}  // namespace foo::sanitizer
