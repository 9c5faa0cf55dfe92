// Objects that the calls of their thread look up while they live.
#pragma once

#include <utility>

namespace foo {

// Base of their classes, `Derived`: a thread's innermost instance is the current one.
template <class Derived>
class Scope {
 public:
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  // Returns this thread's innermost instance, or nullptr.
  static Derived* current() { return current_; }

 protected:
  Scope() : outer_(std::exchange(current_, static_cast<Derived*>(this))) {}
  ~Scope() { current_ = outer_; }

 private:
  static inline thread_local Derived* current_ = nullptr;

  Derived* outer_;
};

}  // namespace foo
