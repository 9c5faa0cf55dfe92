// Forward-mode differentiation of elementwise operators with their backward operators.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

#include "launch/gradients.h"

namespace foo {

// Calls an elementwise operator below autograd, records the call if an argument requires a
// gradient, and sets the tangents of the results.
void call_with_tangents(const std::shared_ptr<const BackwardOperator>& backward,
                        const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack);

}  // namespace foo
