#include "device/process.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <mutex>

namespace foo::device {
namespace {

// Another thread may have held a lock of the device at the fork; nobody in the child would ever
// release it.
void after_fork_in_child() {
  if (is_initialized()) process_state = ProcessState::kForked;
}

}  // namespace

std::atomic<ProcessState> process_state{ProcessState::kUntouched};

void initialize_slowly() {
  TORCH_CHECK(!is_in_bad_fork(),
              "Cannot re-initialize foo in forked subprocess. To use foo with multiprocessing, you "
              "must use the 'spawn' start method");
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, &after_fork_in_child); });
  process_state = ProcessState::kInitialized;
}

}  // namespace foo::device
