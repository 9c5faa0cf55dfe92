// Helpers of kernels on autograd's keys: inspect a call and pass it on.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

namespace foo {

// The operator's arguments, on top of the stack.
inline c10::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op,
                                               const torch::jit::Stack& stack) {
  return torch::jit::last(stack, op.schema().arguments().size());
}

// Whether gradients are recorded and one of the operator's arguments requires one.
bool needs_gradient(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Whether one of the operator's arguments has a tangent of forward-mode differentiation.
bool has_tangent(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns the arguments that an operator writes, without inference tensors.
std::vector<at::Tensor> written_tensors(const c10::OperatorHandle& op,
                                        const torch::jit::Stack& stack);

// Calls the operator's kernel for the first of these keys below autograd.
void redispatch_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                               torch::jit::Stack* stack);

}  // namespace foo
