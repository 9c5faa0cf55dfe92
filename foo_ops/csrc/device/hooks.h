// ATen's hooks for an accelerator, and the threads of its autograd engine.

#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace foo::device {

// ATen's hooks for an accelerator: devices, generators, storage growth.
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

// Waits until no thread of the autograd engine refers to a finished backward pass. Call without the
// GIL.
void wait_for_autograd_threads();

}  // namespace foo::device
