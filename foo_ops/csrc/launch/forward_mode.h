// Forward-mode differentiation of elementwise operators, by their backward operators.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

#include "launch/gradients.h"

namespace foo {

// Calls an elementwise operator below autograd, recorded if an argument requires a gradient, and
// gives its results their tangents.
void call_with_tangents(const std::shared_ptr<const BackwardOperator>& backward,
                        const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack);

}  // namespace foo
