// The process that the device lives in: like a driver's, its state does not survive a fork.
#pragma once

#include <atomic>

namespace foo::device {

enum class ProcessState { kUntouched, kInitialized, kForked };

extern std::atomic<ProcessState> process_state;

// The work that everyone's first use of the device waits for. Set once, at load.
extern void (*before_first_use)();

// Raises in a forked child of a process that has touched the device.
void initialize_slowly();

// To be called before anything that touches the device.
inline void initialize() {
  if (process_state.load(std::memory_order_acquire) == ProcessState::kInitialized) return;
  initialize_slowly();
}

inline bool is_initialized() {
  return process_state.load(std::memory_order_relaxed) == ProcessState::kInitialized;
}

inline bool is_in_bad_fork() {
  return process_state.load(std::memory_order_relaxed) == ProcessState::kForked;
}

}  // namespace foo::device
