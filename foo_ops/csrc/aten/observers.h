// Who is called around what runs on foo, and on which streams that is. Nobody is as a rule.

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

// Who is called around what runs on foo. Nobody is as a rule, and each place costs a load.

using Tensors = std::vector<at::Tensor>;

class CallObserver {
 public:
  virtual ~CallObserver() = default;

  // An operator, whose arguments and then results are on the stack.
  virtual void around_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                               c10::function_ref<void()> run) = 0;
  // A graph that was compiled as a whole.
  virtual Tensors around_graph(const Tensors& inputs, c10::function_ref<Tensors()> run) = 0;
  // Any operator, on whatever device.
  virtual void before_operator(const c10::OperatorHandle& /*op*/,
                               const at::RecordFunction& /*call*/) {}
  // Whether it wants before_operator just now.
  virtual bool sees_all_devices() { return false; }
};

// Each is called around those after it.
enum class Observing { kCapture, kSanitizer, kProfiler };
inline constexpr size_t kObservers = 3;

inline std::array<std::atomic<CallObserver*>, kObservers> call_observers{};

inline CallObserver* call_observer(Observing kind) {
  return call_observers[static_cast<size_t>(kind)].load(std::memory_order_acquire);
}

// While one lives, this thread runs an operator for a graph to have its results' shapes. On a GPU
// it would not run.
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

// Where an operator runs.

// The current stream of the first tensor's device, else that of the device that an argument names,
// else that of the current one.
c10::Stream stream_of_call(c10::ArrayRef<c10::IValue> arguments);

// The devices of all tensors, or else those that arguments name, or else the current one.
std::set<c10::DeviceIndex> devices_of_call(c10::ArrayRef<c10::IValue> arguments);

// Puts observers around every operator on foo: what stands in front of kernels for that is gone
// when the last one leaves.

// Nobody of its kind may be there.
void add_call_observer(Observing kind, CallObserver& observer);
void remove_call_observer(Observing kind);

}  // namespace foo::aten
