// Says where the host waits for the device without being told to, as torch.cuda's
// set_sync_debug_mode does.
#pragma once

#include <atomic>
#include <string>

namespace foo::device {

enum class SyncDebugMode { kDefault, kWarn, kError };

inline std::atomic<SyncDebugMode> sync_debug_mode = SyncDebugMode::kDefault;

// Warns or raises, as the mode says, before the operator runs.
void report_synchronization(const std::string& operator_name);

inline bool reports_synchronization() {
  return sync_debug_mode.load(std::memory_order_relaxed) != SyncDebugMode::kDefault;
}

}  // namespace foo::device
