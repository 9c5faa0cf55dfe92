// The sanitizer's place around what runs on foo. Null while it is off.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <vector>

namespace foo::aten {

struct CallObserver {
  // An operator, whose arguments and then results are on the stack.
  void (*around_operator)(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                          c10::function_ref<void()> run);
  // A graph that was compiled as a whole.
  std::vector<at::Tensor> (*around_graph)(const std::vector<at::Tensor>& inputs,
                                          c10::function_ref<std::vector<at::Tensor>()> run);
};

inline std::atomic<const CallObserver*> call_observer = nullptr;

}  // namespace foo::aten
