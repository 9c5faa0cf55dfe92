// Locks that a forked child finds free.
#pragma once

#include <mutex>

namespace foo {

// A mutex that no thread holds during a fork. Otherwise a child could wait for ever, as the thread
// that held it is not there to release it. The code that it guards may lock only mutexes that were
// made before it, and make none.
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
