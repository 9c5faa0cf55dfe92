// Kernels that work on every operator of a kind, given to operators by name.

#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace foo {

// The operator with a name such as "foo::abs.out"; raises if there is none.
c10::OperatorHandle find_operator(const std::string& name);

// Its name in messages, without namespace and overload: "abs".
std::string short_name(const std::string& operator_name);

// Registers a kernel until what is returned is destroyed.
c10::RegistrationHandleRAII hold_kernel(const std::string& operator_name, c10::DispatchKey key,
                                        c10::KernelFunction kernel);

// Registers a kernel for the rest of the process.
void register_kernel(const std::string& operator_name, c10::DispatchKey key,
                     c10::KernelFunction kernel);

// Whether gradients are recorded and one of the operator's arguments, on top of the stack, requires
// one.
bool needs_gradient(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Calls an operator's kernel for the first of these keys that stands below autograd.
void redispatch_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                               torch::jit::Stack* stack);

// Puts a C++ kernel in front of the Python autograd formula that torch.library.register_autograd
// has registered: calls that need no gradient go straight on below autograd.
std::vector<c10::RegistrationHandleRAII> register_autograd_shortcut(
    const std::string& operator_name);

// Makes an operator that writes to its arguments count their versions, so that autograd notices.
c10::RegistrationHandleRAII count_versions(const std::string& operator_name);

}  // namespace foo
