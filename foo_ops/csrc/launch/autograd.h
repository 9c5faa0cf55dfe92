// Gradients and tangents of operators: kernels on their autograd keys, registered by the operators'
// names, and the nodes that these kernels add to autograd's graph.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <vector>

#include "launch/gradients.h"
#include "launch/registration.h"

namespace foo {

// Source of an operator's forward-mode tangents.
enum class Tangents {
  // The backward operator gives the partial derivatives: for elementwise operators.
  kPartialDerivatives,
  // A Python function on the Autograd key computes the result with PyTorch's own operators.
  kComposite,
  kNotImplemented,
};

// Computes an operator's gradients with another operator, see BackwardOperator.
Registrations register_backward_operator(const std::string& operator_name,
                                         const std::string& backward_name, Tangents tangents);

// Computes an operator's gradients with a formula. Tangents are kComposite or kNotImplemented.
Registrations register_formula(const std::string& operator_name,
                               const std::shared_ptr<const Formula>& formula, Tangents tangents);

// Allows calls while gradients are recorded, but throws `message` as a NotImplementedError when a
// gradient or a tangent passes through the operator, unless there is a kernel on the Autograd key
// by then.
Registrations refuse_to_differentiate(const std::string& operator_name, const std::string& message);

// Differentiates `f_` as `self.copy_(f(self.clone()))`, which handles views and versions, and makes
// `f.out` refuse arguments that require a gradient, as PyTorch's own do.
Registrations register_variant_autograd(const std::string& operator_name);

// Bumps the versions of the arguments that an operator writes, so that autograd notices.
c10::RegistrationHandleRAII count_versions(const std::string& operator_name);

}  // namespace foo
