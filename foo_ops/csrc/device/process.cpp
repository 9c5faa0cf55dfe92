#include "device/process.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include "launch/operator_counts.h"

namespace foo::device {
namespace {

// Threads of the device, such as autograd's, are missing in the child, and so is any thread that
// held their locks.
void after_fork_in_child() {
  if (!is_initialized()) return;
  process_state = ProcessState::kForked;
  before_first_call = &initialize_slowly;
}

const int fork_handler_registered = [] {
  before_first_call = &initialize_slowly;
  return pthread_atfork(nullptr, nullptr, &after_fork_in_child);
}();

}  // namespace

std::atomic<ProcessState> process_state{ProcessState::kUntouched};

void initialize_slowly() {
  TORCH_CHECK(!is_in_bad_fork(),
              "Cannot re-initialize foo in forked subprocess. To use foo with multiprocessing, you "
              "must use the 'spawn' start method");
  process_state = ProcessState::kInitialized;
  before_first_call = nullptr;
}

}  // namespace foo::device
