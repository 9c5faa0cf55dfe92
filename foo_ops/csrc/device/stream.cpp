#include "device/stream.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <utility>

#include "device/device.h"

namespace foo::device {
namespace {

constexpr c10::StreamId kDefaultStream = 0;

thread_local std::array<c10::StreamId, kMaxDevices> current_stream_ids{};

c10::Stream make_stream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFoo, index), id);
}

}  // namespace

c10::Stream default_stream(c10::DeviceIndex index) {
  initialize();
  check_device_index(index);
  return make_stream(index, kDefaultStream);
}

c10::Stream new_stream(c10::DeviceIndex index) {
  static std::atomic<c10::StreamId> next_id{kDefaultStream + 1};
  initialize();
  check_device_index(index);
  return make_stream(index, next_id.fetch_add(1, std::memory_order_relaxed));
}

c10::Stream current_stream(c10::DeviceIndex index) {
  initialize();
  check_device_index(index);
  return make_stream(index, current_stream_ids[index]);
}

c10::Stream exchange_current_stream(c10::Stream stream) {
  const c10::DeviceIndex index = stream.device_index();
  check_device_index(index);
  return make_stream(index, std::exchange(current_stream_ids[index], stream.id()));
}

double elapsed_milliseconds(const Event& start, const Event& end) {
  return std::chrono::duration<double, std::milli>(end.recorded_at - start.recorded_at).count();
}

void report_synchronization(const std::string& operator_name) {
  const auto mode = sync_debug_mode.load(std::memory_order_relaxed);
  TORCH_CHECK(mode != SyncDebugMode::kError, operator_name,
              ": called a synchronizing operation: the host waits for the device");
  if (mode == SyncDebugMode::kWarn) {
    TORCH_WARN(operator_name, ": called a synchronizing operation: the host waits for the device");
  }
}

}  // namespace foo::device
