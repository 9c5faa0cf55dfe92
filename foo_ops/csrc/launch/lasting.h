// Results that stay for long, such as those that a recorded program uses again in each run.
#pragma once

#include <utility>

namespace foo {

// While an instance lives, this thread's new results have memory of the C library: blocks for small
// results are few.
class LastingResults {
 public:
  LastingResults() : outer_(std::exchange(lives_, true)) {}
  ~LastingResults() { lives_ = outer_; }
  LastingResults(const LastingResults&) = delete;
  LastingResults& operator=(const LastingResults&) = delete;

  static bool lives() { return lives_; }

 private:
  static inline thread_local bool lives_ = false;

  bool outer_;
};

}  // namespace foo
