// The devices: their number, and the current one of this thread.
#pragma once

#include <c10/core/Device.h>

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

}  // namespace foo::device
