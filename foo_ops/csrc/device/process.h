// State of the device in this process: like a driver's, it does not survive a fork.
#pragma once

#include <atomic>

namespace foo::device {

enum class ProcessState { kUntouched, kInitialized, kForked };

extern std::atomic<ProcessState> process_state;

// Work that must be done before the first use of the device. Set once, at load.
extern void (*before_first_use)();

// Raises in a forked child of a process that has touched the device.
void initialize_slowly();

// Call this before anything that touches the device.
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
