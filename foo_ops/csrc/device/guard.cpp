#include "device/guard.h"

#include <c10/util/Exception.h>

#include "device/allocator.h"
#include "device/device.h"
#include "device/observer.h"
#include "device/stream.h"

namespace foo::device {
namespace {

void check_type(c10::Device device) {
  TORCH_CHECK(device.type() == kFoo, "foo: device must be of type foo, got ", device);
}

}  // namespace

GuardImpl::GuardImpl(c10::DeviceType type) {
  check_type(type);
}

c10::DeviceType GuardImpl::type() const {
  return kFoo;
}

c10::Device GuardImpl::exchangeDevice(c10::Device device) const {
  check_type(device);
  return {kFoo, exchange_current_device(with_index(device).index())};
}

c10::Device GuardImpl::getDevice() const {
  return {kFoo, current_device()};
}

void GuardImpl::setDevice(c10::Device device) const {
  check_type(device);
  set_current_device(with_index(device).index());
}

void GuardImpl::uncheckedSetDevice(c10::Device device) const noexcept {
  set_current_device_unchecked(device.index());
}

// Must not throw. The Python module reads the count first, and raises.
c10::DeviceIndex GuardImpl::deviceCount() const noexcept {
  try {
    return device_count();
  } catch (const c10::ValueError&) {
    return 0;
  }
}

c10::DeviceCapability GuardImpl::getDeviceCapability(c10::Device) const {
  return {};
}

void GuardImpl::synchronizeDevice(c10::DeviceIndex index) const {
  initialize();
  check_device_index(index);
  observe([&](Observer& observer) { observer.host_waits_for_device(index); });
}

c10::Stream GuardImpl::getStream(c10::Device device) const {
  return current_stream(with_index(device).index());
}

c10::Stream GuardImpl::getDefaultStream(c10::Device device) const {
  return default_stream(with_index(device).index());
}

// Streams cost nothing here: there is no pool to share and no priority to observe.
c10::Stream GuardImpl::getStreamFromGlobalPool(c10::Device device, bool) const {
  return new_stream(with_index(device).index());
}

c10::Stream GuardImpl::getNewStream(c10::Device device, int) const {
  return new_stream(with_index(device).index());
}

c10::Stream GuardImpl::exchangeStream(c10::Stream stream) const {
  check_type(stream.device());
  return exchange_current_stream(stream);
}

// Like CUDA's, the default stream has a null handle.
void* GuardImpl::getStreamNativeHandle(c10::Stream stream) const {
  return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
}

bool GuardImpl::queryStream(const c10::Stream& stream) const {
  synchronizeStream(stream);
  return true;
}

void GuardImpl::synchronizeStream(const c10::Stream& stream) const {
  observe([&](Observer& observer) { observer.host_waits_for_stream(stream); });
}

void GuardImpl::recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const {
  allocator().recordStream(memory, stream);
}

void GuardImpl::record(void** event, const c10::Stream& stream, c10::DeviceIndex index,
                       c10::EventFlag) const {
  initialize();
  check_type(stream.device());
  TORCH_CHECK(index == -1 || index == stream.device_index(),
              "foo: event of device foo:", int{index}, " cannot be recorded on a stream of device ",
              stream.device());
  if (*event == nullptr) *event = new Event();
  *static_cast<Event*>(*event) = {std::chrono::steady_clock::now(), stream.device_index()};
  observe([&](Observer& observer) { observer.event_recorded(*event, stream); });
}

void GuardImpl::block(void* event, const c10::Stream& stream) const {
  observe([&](Observer& observer) { observer.stream_waits(stream, event); });
}

bool GuardImpl::queryEvent(void* event) const {
  synchronizeEvent(event);
  return true;
}

void GuardImpl::synchronizeEvent(void* event) const {
  observe([&](Observer& observer) { observer.host_waits_for_event(event); });
}

double GuardImpl::elapsedTime(void* start, void* end, c10::DeviceIndex) const {
  const auto& first = *static_cast<Event*>(start);
  const auto& last = *static_cast<Event*>(end);
  TORCH_CHECK(first.device == last.device,
              "foo: both events must be of the same device, got one of foo:", int{first.device},
              " and one of foo:", int{last.device});
  return elapsed_milliseconds(first, last);
}

void GuardImpl::destroyEvent(void* event, c10::DeviceIndex) const noexcept {
  observe([&](Observer& observer) { observer.event_destroyed(event); });
  delete static_cast<Event*>(event);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

}  // namespace foo::device
