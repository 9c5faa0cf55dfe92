// Who is called around what runs on foo. Nobody is as a rule, and each place costs a load.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <atomic>
#include <vector>

namespace foo::aten {

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

// The first is called around the second.
enum class Observing { kSanitizer, kCapture };

inline std::array<std::atomic<CallObserver*>, 2> call_observers{};

inline CallObserver* call_observer(Observing kind) {
  return call_observers[static_cast<size_t>(kind)].load(std::memory_order_acquire);
}

// Calls observers around an operator, and runs it.
inline void observe_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                             c10::function_ref<void()> run) {
  CallObserver* const sanitizer = call_observer(Observing::kSanitizer);
  CallObserver* const capture = call_observer(Observing::kCapture);
  const auto run_captured = [&] {
    capture != nullptr ? capture->around_operator(op, stack, run) : run();
  };
  sanitizer != nullptr ? sanitizer->around_operator(op, stack, run_captured) : run_captured();
}

inline Tensors observe_graph(const Tensors& inputs, c10::function_ref<Tensors()> run) {
  CallObserver* const sanitizer = call_observer(Observing::kSanitizer);
  CallObserver* const capture = call_observer(Observing::kCapture);
  const auto run_captured = [&] {
    return capture != nullptr ? capture->around_graph(inputs, run) : run();
  };
  return sanitizer != nullptr ? sanitizer->around_graph(inputs, run_captured) : run_captured();
}

}  // namespace foo::aten
