// Lets torch's profiler time operators on a device, with
// torch.autograd.profiler.profile(use_device="foo"). Each operator is done when it returns, so the
// host's time is the device's.

#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <memory>

#include "device/device.h"
#include "device/guard.h"
#include "device/stream.h"

namespace foo::device {
namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

class Profiler final : public torch::profiler::impl::ProfilerStubs {
 public:
  bool enabled() const override { return true; }

  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event,
              int64_t* host_nanoseconds) const override {
    if (device != nullptr) *device = current_device();
    if (host_nanoseconds != nullptr) *host_nanoseconds = c10::getTime();
    *event = std::make_shared<Event>(Event{std::chrono::steady_clock::now(), current_device()});
  }

  // Returns microseconds.
  float elapsed(const ProfilerVoidEventStub* start,
                const ProfilerVoidEventStub* end) const override {
    return static_cast<float>(1000 * elapsed_milliseconds(*static_cast<Event*>(start->get()),
                                                          *static_cast<Event*>(end->get())));
  }

  // No tool shows marks and ranges for this device.
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}

  void onEachDevice(std::function<void(int)> function) const override {
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      const DeviceGuard guard(c10::Device(kFoo, index));
      function(index);
    }
  }

  void synchronize() const override {}
};

const bool profiler_registered = [] {
  // Never destroyed: torch keeps the pointer.
  torch::profiler::impl::registerPrivateUse1Methods(new Profiler());
  return true;
}();

}  // namespace
}  // namespace foo::device
