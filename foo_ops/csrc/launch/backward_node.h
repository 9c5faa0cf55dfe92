// Nodes of autograd's graph whose gradients a backward operator or a formula computes.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <string>

#include "launch/gradients.h"

namespace foo {

// Calls an operator below autograd and records the call in autograd's graph, like the code that
// PyTorch generates for its own operators. torch.func would refuse a torch::autograd::Function.
void call_and_record(const std::shared_ptr<const BackwardOperator>& backward,
                     const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack);

// Same, with the gradients of a formula.
void call_and_record_formula(const std::shared_ptr<const Formula>& formula,
                             const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack);

// Same, for an operator without derivatives: the node throws a NotImplementedError.
void call_and_record_refusal(const std::string& message, const c10::OperatorHandle& op,
                             c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace foo
