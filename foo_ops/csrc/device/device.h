// The devices: their number, the current one of this thread, and their state in this process.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <optional>

namespace foo::device {

inline constexpr c10::DeviceType kFoo = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kMaxDevices = 64;
// Index that means no device.
inline constexpr c10::DeviceIndex kNoDevice = -1;

// Returns FOO_DEVICE_COUNT, or 2. Raises while the variable is not a number of devices.
c10::DeviceIndex device_count();

// Returns FOO_MEMORY_LIMIT, the bytes of each device, if it is set. Raises while it is not a number
// of bytes.
std::optional<size_t> memory_limit();

void check_device_index(int64_t index);

c10::DeviceIndex current_device() noexcept;
// Raises if there is no device with this index.
void set_current_device(int64_t index);
void set_current_device_unchecked(c10::DeviceIndex index) noexcept;
c10::DeviceIndex exchange_current_device(c10::DeviceIndex index);

// Replaces "foo" without an index by the current device.
c10::Device with_index(c10::Device device);

// Like a driver's, the state does not survive a fork.
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
