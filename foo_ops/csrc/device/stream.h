// Streams and events, which are always idle, and the places where the host would wait for them.

#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <string>

namespace foo::device {

// Every operator is done when it returns, so each stream is always idle and each recorded event has
// already happened; streams and events have only identity, order and time.
struct Event {
  std::chrono::steady_clock::time_point recorded_at;
  c10::DeviceIndex device;
};

c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream new_stream(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
// Makes the stream the current one of its device in this thread and returns the previous one.
c10::Stream exchange_current_stream(c10::Stream stream);

double elapsed_milliseconds(const Event& start, const Event& end);

// Reports where the host waits for the device implicitly, like torch.cuda.set_sync_debug_mode.
enum class SyncDebugMode { kDefault, kWarn, kError };

inline std::atomic<SyncDebugMode> sync_debug_mode = SyncDebugMode::kDefault;

// Warns or raises, according to the mode, before the operator runs.
void report_synchronization(const std::string& operator_name);

inline bool reports_synchronization() {
  return sync_debug_mode.load(std::memory_order_relaxed) != SyncDebugMode::kDefault;
}

}  // namespace foo::device
