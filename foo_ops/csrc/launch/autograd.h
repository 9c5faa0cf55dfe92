// Kernels on the autograd keys of operators, given to operators by name.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <string>
#include <vector>

#include "launch/formula.h"

namespace foo {

using Registrations = std::vector<c10::RegistrationHandleRAII>;

// Whether gradients are recorded and one of the operator's arguments, on top of the stack, requires
// one.
bool needs_gradient(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Whether one of the operator's arguments, on top of the stack, has a tangent of forward-mode
// differentiation.
bool has_tangent(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// The tensors that an operator writes among its arguments, on top of the stack.
std::vector<at::Tensor> written_tensors(const c10::OperatorHandle& op,
                                        const torch::jit::Stack& stack);

// Calls an operator's kernel for the first of these keys that stands below autograd.
void redispatch_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                               torch::jit::Stack* stack);

// How the tangents of an operator with a backward operator are found.
enum class Tangents {
  // The backward operator gives the partial derivatives, as an elementwise operator's does.
  kPartialDerivatives,
  // A Python function on the Autograd key computes the same with PyTorch's own operators.
  kComposite,
  kNotImplemented,
};

// Lets an operator's gradients be computed by another operator, see BackwardOperator.
Registrations register_backward_operator(const std::string& operator_name,
                                         const std::string& backward_name, Tangents tangents);

// Lets an operator's gradients be computed by a formula. Tangents are kComposite or not
// implemented.
Registrations register_formula(const std::string& operator_name,
                               const std::shared_ptr<const Formula>& formula, Tangents tangents);

// Lets an operator be called where gradients are recorded, and throws the message as a
// NotImplementedError where a gradient or a tangent goes through it, unless there is a kernel on
// the Autograd key by then.
Registrations refuse_to_differentiate(const std::string& operator_name, const std::string& message);

// Differentiates `f_` as `self.copy_(f(self.clone()))`, which handles views and versions, and lets
// `f.out` refuse arguments that need a gradient, as PyTorch's own do.
Registrations register_variant_autograd(const std::string& operator_name);

// Makes an operator that writes to its arguments count their versions, so that autograd notices.
c10::RegistrationHandleRAII count_versions(const std::string& operator_name);

}  // namespace foo
