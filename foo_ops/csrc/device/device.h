// The devices themselves: how many there are, and which one is current in this thread.
#pragma once

#include <c10/core/Device.h>

#include <optional>

namespace foo::device {

inline constexpr c10::DeviceType kFoo = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kMaxDevices = 64;
// Where an index may stand for no device at all.
inline constexpr c10::DeviceIndex kNoDevice = -1;

// FOO_DEVICE_COUNT, or 2. Raises while the variable holds anything but a number of devices.
c10::DeviceIndex device_count();

// FOO_MEMORY_LIMIT: the bytes that each device has, if it is set. Raises while it holds anything
// but a number of bytes.
std::optional<size_t> memory_limit();

void check_device_index(int64_t index);

c10::DeviceIndex current_device() noexcept;
// Raises for an index without a device.
void set_current_device(int64_t index);
void set_current_device_unchecked(c10::DeviceIndex index) noexcept;
c10::DeviceIndex exchange_current_device(c10::DeviceIndex index);

// "foo" without an index means the current device.
c10::Device with_index(c10::Device device);

}  // namespace foo::device
