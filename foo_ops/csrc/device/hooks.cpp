#include "device/hooks.h"

#include <ATen/native/Resize.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "device/allocator.h"
#include "device/device.h"
#include "device/generator.h"
#include "device/guard.h"
#include "device/heap.h"
#include "device/observer.h"
#include "device/pinned_memory.h"
#include "launch/memory.h"

namespace foo::device {

void Hooks::init() const {
  initialize();
}

bool Hooks::isBuilt() const {
  return true;
}

bool Hooks::isAvailable() const {
  return GuardImpl().deviceCount() > 0;
}

bool Hooks::hasPrimaryContext(c10::DeviceIndex index) const {
  check_device_index(index);
  return is_initialized();
}

c10::DeviceIndex Hooks::deviceCount() const {
  return device_count();
}

void Hooks::setCurrentDevice(c10::DeviceIndex index) const {
  set_current_device(index);
}

c10::DeviceIndex Hooks::getCurrentDevice() const {
  return current_device();
}

c10::DeviceIndex Hooks::exchangeDevice(c10::DeviceIndex index) const {
  return exchange_current_device(index);
}

// As in c10's optional device guards, a negative index changes nothing.
c10::DeviceIndex Hooks::maybeExchangeDevice(c10::DeviceIndex index) const {
  return index < 0 ? current_device() : exchange_current_device(index);
}

const at::Generator& Hooks::getDefaultGenerator(c10::DeviceIndex index) const {
  return default_generator(index);
}

at::Generator Hooks::getNewGenerator(c10::DeviceIndex index) const {
  return new_generator(index);
}

c10::Device Hooks::getDeviceFromPtr(void* address) const {
  const auto index = device_of_address(address);
  TORCH_CHECK(index.has_value(), "foo: address ", address, " is not in memory of foo");
  return {kFoo, *index};
}

c10::Allocator* Hooks::getPinnedMemoryAllocator() const {
  return &pinned_memory_allocator();
}

bool Hooks::isPinnedPtr(const void* address) const {
  return is_pinned(address);
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  // The allocator serves the current device; the storage may be on another.
  const c10::Device device = storage.device();
  const DeviceGuard guard(device);
  const size_t kept = std::min(bytes, storage.nbytes());
  const DeviceAccess access;
  at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  observe([&](Observer& observer) { observer.written(storage.data(), kept); });
  // torch's function labels a storage without memory as the CPU's.
  if (bytes == 0) storage.set_data_ptr_noswap({nullptr, device});
}

namespace {

const bool hooks_registered = [] {
  // Never destroyed: torch keeps the pointer.
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

// The engine returns from a backward pass before its threads have dropped the last reference to the
// pass, and with it to the caller's Python context. A thread takes its next task only after that;
// and a pass started from C++ has no Python context.
void wait_for_autograd_threads() {
  if (!is_initialized()) return;
  const c10::InferenceMode mode(false);
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    const auto nothing = at::zeros({0}, at::device({kFoo, index})).set_requires_grad(true);
    torch::autograd::backward({nothing}, {at::zeros_like(nothing)});
  }
}

}  // namespace foo::device
