// Observers of the operators and graphs that run on foo, and the streams they run on. Usually there
// is none.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <atomic>
#include <set>
#include <vector>

namespace foo::aten {

// Observers are called around everything that runs on foo. Without them each place costs a load.

using Tensors = std::vector<at::Tensor>;

class CallObserver {
 public:
  virtual ~CallObserver() = default;

  // Called for an operator; its arguments, and after `run` its results, are on the stack.
  virtual void around_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                               c10::function_ref<void()> run) = 0;
  // Called for a graph that was compiled as a whole.
  virtual Tensors around_graph(const Tensors& inputs, c10::function_ref<Tensors()> run) = 0;
  // Called before any operator, on any device.
  virtual void before_operator(const c10::OperatorHandle& /*op*/,
                               const at::RecordFunction& /*call*/) {}
  // Whether before_operator must be called now.
  virtual bool sees_all_devices() { return false; }
};

// Kinds of observers. Each wraps those after it.
enum class Observing { kCapture, kSanitizer, kProfiler };
inline constexpr size_t kObservers = 3;

inline std::array<std::atomic<CallObserver*>, kObservers> call_observers{};

inline CallObserver* call_observer(Observing kind) {
  return call_observers[static_cast<size_t>(kind)].load(std::memory_order_acquire);
}

// While an instance lives, this thread runs an operator for a graph only to get its results'
// shapes. A GPU would not run the operator.
class InCapturedOperator {
 public:
  InCapturedOperator() { is_there_ = true; }
  ~InCapturedOperator() { is_there_ = false; }
  InCapturedOperator(const InCapturedOperator&) = delete;
  InCapturedOperator& operator=(const InCapturedOperator&) = delete;

  static bool is_there() { return is_there_; }

 private:
  static inline thread_local bool is_there_ = false;
};

// Calls observers around an operator, and runs it.
inline void observe_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                             c10::function_ref<void()> run, size_t first = 0) {
  for (size_t kind = first; kind < kObservers; ++kind) {
    CallObserver* const observer = call_observer(static_cast<Observing>(kind));
    if (observer == nullptr) [[likely]]
      continue;
    return observer->around_operator(op, stack,
                                     [&] { observe_operator(op, stack, run, kind + 1); });
  }
  run();
}

inline Tensors observe_graph(const Tensors& inputs, c10::function_ref<Tensors()> run,
                             size_t first = 0) {
  for (size_t kind = first; kind < kObservers; ++kind) {
    CallObserver* const observer = call_observer(static_cast<Observing>(kind));
    if (observer == nullptr) [[likely]]
      continue;
    return observer->around_graph(inputs, [&] { return observe_graph(inputs, run, kind + 1); });
  }
  return run();
}

// Returns the stream that an operator runs on: the current stream of the first tensor's device,
// else of the device that an argument names, else of the current device.
c10::Stream stream_of_call(c10::ArrayRef<c10::IValue> arguments);

// Returns the devices of all tensors, or else those that arguments name, or else the current one.
std::set<c10::DeviceIndex> devices_of_call(c10::ArrayRef<c10::IValue> arguments);

// Adds an observer of every operator on foo; no other one of its kind may exist. The kernel
// wrappers for observers disappear when the last one is removed.
void add_call_observer(Observing kind, CallObserver& observer);
void remove_call_observer(Observing kind);

}  // namespace foo::aten
