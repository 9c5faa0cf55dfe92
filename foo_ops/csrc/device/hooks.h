// The hooks by which ATen reaches an accelerator, and the threads of its autograd engine.

#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace foo::device {

// The hooks by which ATen reaches an accelerator: devices, generators, storage growth.

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override;
  bool isBuilt() const override;
  bool isAvailable() const override;
  bool hasPrimaryContext(c10::DeviceIndex index) const override;

  c10::DeviceIndex deviceCount() const override;
  void setCurrentDevice(c10::DeviceIndex index) const override;
  c10::DeviceIndex getCurrentDevice() const override;
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override;
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override;

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override;
  at::Generator getNewGenerator(c10::DeviceIndex index) const override;

  c10::Allocator* getPinnedMemoryAllocator() const override;
  c10::Device getDeviceFromPtr(void* address) const override;
  bool isPinnedPtr(const void* address) const override;

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

// The threads in which torch's autograd engine runs what belongs to a device.

// Returns once no thread of the engine holds anything of a backward pass that is over. The GIL must
// not be held.
void wait_for_autograd_threads();

}  // namespace foo::device
