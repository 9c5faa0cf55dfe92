#include "device/device.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace foo::device {
namespace {

constexpr c10::DeviceIndex kDefaultDeviceCount = 2;

thread_local c10::DeviceIndex current_index = 0;

c10::DeviceIndex read_device_count() {
  const char* variable = std::getenv("FOO_DEVICE_COUNT");
  if (variable == nullptr) return kDefaultDeviceCount;
  const std::string_view text = variable;
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  TORCH_CHECK_VALUE(is_number && count >= 1 && count <= kMaxDevices,
                    "FOO_DEVICE_COUNT must be an integer from 1 to ", int{kMaxDevices}, ", got '",
                    text, "'");
  return static_cast<c10::DeviceIndex>(count);
}

}  // namespace

c10::DeviceIndex device_count() {
  static const c10::DeviceIndex count = read_device_count();
  return count;
}

void check_device_index(int64_t index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "foo: device index must be from 0 to ",
              int{device_count()} - 1, ", got ", index);
}

c10::DeviceIndex current_device() noexcept {
  return current_index;
}

void set_current_device(int64_t index) {
  check_device_index(index);
  current_index = static_cast<c10::DeviceIndex>(index);
}

void set_current_device_unchecked(c10::DeviceIndex index) noexcept {
  current_index = index;
}

c10::DeviceIndex exchange_current_device(c10::DeviceIndex index) {
  check_device_index(index);
  return std::exchange(current_index, index);
}

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(device.type(), current_index);
}

}  // namespace foo::device
