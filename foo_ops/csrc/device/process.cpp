#include "device/process.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <mutex>

#include "launch/fork_mutex.h"
#include "launch/operator_counts.h"

namespace foo::device {
namespace {

// The child lacks the device's threads, such as autograd's, and any thread that held their locks.
void after_fork_in_child() {
  if (!is_initialized()) return;
  process_state = ProcessState::kForked;
  before_first_call = &initialize_slowly;
}

// Made at load, before the mutexes that a thread may hold here. Never destroyed: threads may come
// here at exit.
ForkMutex& first_use = *new ForkMutex();

const int fork_handler_registered = [] {
  before_first_call = &initialize_slowly;
  return pthread_atfork(nullptr, nullptr, &after_fork_in_child);
}();

}  // namespace

std::atomic<ProcessState> process_state{ProcessState::kUntouched};

void (*before_first_use)() = nullptr;

void initialize_slowly() {
  TORCH_CHECK(!is_in_bad_fork(),
              "Cannot re-initialize foo in forked subprocess. To use foo with multiprocessing, you "
              "must use the 'spawn' start method");
  const std::lock_guard lock(first_use);
  if (is_initialized()) return;
  before_first_use();
  process_state = ProcessState::kInitialized;
  before_first_call = nullptr;
}

}  // namespace foo::device
