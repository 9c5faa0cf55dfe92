// Kernels on the autograd keys of operators, given to operators by name.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <vector>

#include "launch/gradients.h"
#include "launch/registration.h"

namespace foo {

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
