// All running captures, and the streams that belong to each.
#pragma once

#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>

#include "aten/observers.h"
#include "device/observer.h"
#include "graphs/capture.h"
#include "launch/fork_mutex.h"

namespace foo::graphs {

// Observes all operators, and waits between streams and the host.
class Recorder final : public aten::CallObserver, public device::Observer {
 public:
  // Begins a capture. The memory pool must have a user until its end.
  std::shared_ptr<Capture> begin(c10::Stream stream, device::PoolId pool);
  // Ends a capture; raises if it has failed.
  Recording end(const std::shared_ptr<Capture>& capture);
  // Returns the capture of a stream, or null.
  std::shared_ptr<Capture> capture_of(c10::Stream stream);
  // Returns the capture of one of the devices of a call, or null.
  std::shared_ptr<Capture> capture_of(c10::ArrayRef<c10::IValue> arguments);
  bool is_capturing();
  // Called when the first capture begins, and when the last one has ended.
  void set_listener(std::function<void(bool)> listener) { listener_ = std::move(listener); }

  void around_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                       c10::function_ref<void()> run) override;
  aten::Tensors around_graph(const aten::Tensors& inputs,
                             c10::function_ref<aten::Tensors()> run) override;

  // A stream that waits for a captured one is captured, too.
  void event_recorded(const void* event, c10::Stream stream) override;
  void event_destroyed(const void* event) noexcept override;
  void stream_waits(c10::Stream stream, const void* event) override;
  void host_waits_for_event(const void* event) override;
  void host_waits_for_stream(c10::Stream stream) override;
  void host_waits_for_device(c10::DeviceIndex index) override;

 private:
  ForkMutex mutex_;
  std::function<void(bool)> listener_;
  std::unordered_map<c10::Stream, std::shared_ptr<Capture>> streams_;
  std::unordered_map<const void*, std::shared_ptr<Capture>> events_;
};

// Never destroyed: events may outlive the static objects of this library.
Recorder& recorder();

}  // namespace foo::graphs
