#include "device/process.h"

#include <c10/util/Exception.h>
#include <pthread.h>

namespace foo::device {
namespace {

// Threads of the device, as those of autograd, are not in the child, nor is who held their locks.
void after_fork_in_child() {
  if (is_initialized()) process_state = ProcessState::kForked;
}

const int registered = pthread_atfork(nullptr, nullptr, &after_fork_in_child);

}  // namespace

std::atomic<ProcessState> process_state{ProcessState::kUntouched};

void initialize_slowly() {
  TORCH_CHECK(!is_in_bad_fork(),
              "Cannot re-initialize foo in forked subprocess. To use foo with multiprocessing, you "
              "must use the 'spawn' start method");
  process_state = ProcessState::kInitialized;
}

}  // namespace foo::device
