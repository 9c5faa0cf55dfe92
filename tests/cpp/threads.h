// Starts threads together, and joins them all.
#pragma once

#include <barrier>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace foo::test {

// Calls the function with each number below `count` on a separate thread, and rethrows an exception
// of one of them.
template <typename Function>
void in_threads(int count, Function function) {
  std::barrier start(count);
  std::mutex mutex;
  std::exception_ptr error;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < count; ++thread) {
    threads.emplace_back([&, thread] {
      start.arrive_and_wait();
      try {
        function(thread);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        error = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace foo::test
