#include "device/synchronization.h"

#include <c10/util/Exception.h>

namespace foo::device {

void report_synchronization(const std::string& operator_name) {
  const auto mode = sync_debug_mode.load(std::memory_order_relaxed);
  TORCH_CHECK(mode != SyncDebugMode::kError, operator_name,
              ": called a synchronizing operation: the host waits for the device");
  if (mode == SyncDebugMode::kWarn) {
    TORCH_WARN(operator_name, ": called a synchronizing operation: the host waits for the device");
  }
}

}  // namespace foo::device
