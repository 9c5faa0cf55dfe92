#include "device/faults.h"

#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cerrno>

#include "device/host_protection.h"
#include "device/memory_protection.h"
#include "device/observer.h"
#include "device/pinned_memory.h"
#include "device/segment_map.h"

namespace foo::device {
namespace {

struct sigaction previous;
// The address of the last fault that another handler got, which is never that of this variable.
std::atomic<const void*> passed_on = &passed_on;

// Where the processor does not tell, a page that can be read was written.
bool is_write([[maybe_unused]] const void* address, [[maybe_unused]] const void* context) {
#if defined(__x86_64__)
  constexpr greg_t kWrite = 2;
  return (static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & kWrite) != 0;
#else
  return host_protection().is_readable(address);
#endif
}

// The process ends as it does where no handler is.
void end_process(int signal_number) {
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

// Until the handler returns. Python that a finding runs, or garbage that it collects, may use the
// device itself, and a fault of a thread that blocks it ends the process without a word.
void unblock_faults() {
  sigset_t faults;
  sigemptyset(&faults);
  sigaddset(&faults, SIGSEGV);
  pthread_sigmask(SIG_UNBLOCK, &faults, nullptr);
}

// The code that was interrupted reads or writes memory, and so holds no lock of ours, nor of malloc
// or Python, but perhaps the GIL.
bool resolve(const void* address, const void* context) {
  if (!memory_protection().is_on()) return false;
  if (memory_protection().open_for_access(address)) return true;
  const bool is_of_device = device_of_address(address).has_value();
  if (!is_of_device && !is_pinned(address)) return false;
  // Kernels copy from and to pinned memory; whether they may is known from their schemas.
  if (is_of_device || !memory_protection().is_used()) {
    unblock_faults();
    observe(
        [&](Observer& observer) { observer.touched_by_host(address, is_write(address, context)); });
  }
  if (is_of_device) {
    end_process(SIGSEGV);
  } else {
    host_protection().open_page(address);
  }
  return true;
}

void pass_on(int signal_number, siginfo_t* information, void* context) {
  // A handler that leaves the signal to the one before it comes back here, as does one that lets
  // the same code fail again.
  const void* const last = passed_on.exchange(information->si_addr);
  const bool is_back =
      last != &passed_on && (information->si_code <= 0 || information->si_addr == last);
  const bool is_default = previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN;
  if (is_default || is_back) return end_process(signal_number);
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal_number, information, context);
  } else {
    previous.sa_handler(signal_number);
  }
}

void on_fault(int signal_number, siginfo_t* information, void* context) {
  const int error = errno;
  const bool is_resolved =
      information->si_code == SEGV_ACCERR && resolve(information->si_addr, context);
  if (!is_resolved) pass_on(signal_number, information, context);
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &on_fault;
}

}  // namespace

void catch_faults() {
  struct sigaction current;
  sigaction(SIGSEGV, nullptr, &current);
  if (is_ours(current)) return;
  struct sigaction ours{};
  ours.sa_sigaction = &on_fault;
  // On the stack of the thread: an alternative one, as Python's faulthandler has it, is too small
  // to run Python on.
  ours.sa_flags = SA_SIGINFO;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, &previous);
}

void leave_faults() {
  struct sigaction current;
  sigaction(SIGSEGV, nullptr, &current);
  if (is_ours(current)) sigaction(SIGSEGV, &previous, nullptr);
}

}  // namespace foo::device
