#include "graphs/recorder.h"

#include <mutex>
#include <utility>

#include "aten/observers.h"
#include "device/device.h"
#include "device/stream.h"

namespace foo::graphs {
namespace {

constexpr const char* kHostWaits = "the host would wait for a stream that is being captured";

}  // namespace

Recorder& recorder() {
  static auto* instance = new Recorder();
  return *instance;
}

std::shared_ptr<Capture> Recorder::begin(c10::Stream stream, device::PoolId pool) {
  auto capture = std::make_shared<Capture>(stream, pool);
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(streams_.count(stream) == 0,
                "capture_begin: another graph is capturing the current stream");
    is_first = streams_.empty();
    streams_[stream] = capture;
  }
  device::begin_pool(stream, pool);
  if (is_first) {
    device::capture_observer.store(this, std::memory_order_release);
    aten::add_call_observer(aten::Observing::kCapture, *this);
    listener_(true);
  }
  return capture;
}

Recording Recorder::end(const std::shared_ptr<Capture>& capture) {
  bool is_last = false;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(events_, [&](const auto& each) { return each.second == capture; });
    for (auto each = streams_.begin(); each != streams_.end();) {
      const bool ends = each->second == capture;
      if (ends) device::end_pool(each->first);
      each = ends ? streams_.erase(each) : std::next(each);
    }
    is_last = streams_.empty();
  }
  if (is_last) {
    listener_(false);
    aten::remove_call_observer(aten::Observing::kCapture);
    device::capture_observer.store(nullptr, std::memory_order_release);
  }
  return capture->end();
}

std::shared_ptr<Capture> Recorder::capture_of(c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  return found == streams_.end() ? nullptr : found->second;
}

std::shared_ptr<Capture> Recorder::capture_of(c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::DeviceIndex index : aten::devices_of_call(arguments)) {
    if (auto capture = capture_of(device::current_stream(index))) return capture;
  }
  return nullptr;
}

bool Recorder::is_capturing() {
  const std::lock_guard lock(mutex_);
  return !streams_.empty();
}

void Recorder::around_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                               c10::function_ref<void()> run) {
  // Operators inside a captured operator belong to it.
  if (aten::InCapturedOperator::is_there()) return run();
  const auto capture = capture_of(torch::jit::last(*stack, op.schema().arguments().size()));
  if (capture == nullptr) return run();
  capture->record(op, stack, run);
}

aten::Tensors Recorder::around_graph(const aten::Tensors& inputs,
                                     c10::function_ref<aten::Tensors()> run) {
  const auto capture = capture_of(std::vector<c10::IValue>{c10::IValue(inputs)});
  if (capture == nullptr || aten::InCapturedOperator::is_there()) return run();
  capture->fail("compiled graph", "the C++ wrapper runs all of its operators as one call");
}

void Recorder::event_recorded(const void* event, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    events_.erase(event);
  } else {
    events_[event] = found->second;
  }
}

void Recorder::event_destroyed(const void* event) noexcept {
  const std::lock_guard lock(mutex_);
  events_.erase(event);
}

void Recorder::stream_waits(c10::Stream stream, const void* event) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return;
  const auto [at_stream, is_new] = streams_.try_emplace(stream, found->second);
  TORCH_CHECK(at_stream->second == found->second,
              "graph: a stream must not wait for a stream that another graph is capturing");
  if (is_new) device::begin_pool(stream, found->second->pool());
}

void Recorder::host_waits_for_event(const void* event) {
  std::shared_ptr<Capture> capture;
  {
    const std::lock_guard lock(mutex_);
    const auto found = events_.find(event);
    if (found != events_.end()) capture = found->second;
  }
  if (capture != nullptr) capture->fail("Event.synchronize", kHostWaits);
}

void Recorder::host_waits_for_stream(c10::Stream stream) {
  if (const auto capture = capture_of(stream)) capture->fail("Stream.synchronize", kHostWaits);
}

void Recorder::host_waits_for_device(c10::DeviceIndex index) {
  std::shared_ptr<Capture> capture;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [stream, its_capture] : streams_) {
      if (stream.device_index() == index) capture = its_capture;
    }
  }
  if (capture != nullptr) capture->fail("synchronize", kHostWaits);
}

}  // namespace foo::graphs
