// Mutexes that are free in a forked child.
#pragma once

#include <mutex>

namespace foo {

// A mutex that no thread holds during a fork. Otherwise a child could wait forever, since the
// thread that held it does not exist there. The guarded code may lock only mutexes that are older,
// and must not create any.
class ForkMutex {
 public:
  ForkMutex();
  ~ForkMutex();
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace foo
