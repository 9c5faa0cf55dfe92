// Kernels that work on every operator of a kind, given to operators by name.

#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace foo {

// Kernels that are meant to give way to ours, so that there is no reason to warn.

// Keeps warnings of this thread back as long as it lives.
class NoWarnings {
  class Handler final : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };

  Handler silent_;
  const c10::WarningUtils::WarningHandlerGuard handler_{&silent_};
  // A warning that is given only once must not be used up here.
  const c10::WarningUtils::WarnAlways always_;
};

// Kernels that work on every operator of a kind, given to operators by name.

using Registrations = std::vector<c10::RegistrationHandleRAII>;

// The operator with a name such as "foo::abs.out"; raises if there is none.
c10::OperatorHandle find_operator(const std::string& name);

// Its name in messages, without namespace and overload: "abs".
std::string short_name(const std::string& operator_name);

// Whether the operator has had a kernel from here: one in C++, not one in Python that is made of
// other operators.
bool has_native_kernel(const std::string& operator_name);

// What an operator's author has registered for autograd of all tensors, as
// torch.library.register_autograd does; there must be such a kernel.
c10::SafeKernelFunction kernel_of_autograd(const c10::OperatorHandle& op);

// Registers a kernel until the returned handle is destroyed.
c10::RegistrationHandleRAII hold_kernel(const std::string& operator_name, c10::DispatchKey key,
                                        c10::KernelFunction kernel);

// Registers a kernel for the rest of the process.
void register_kernel(const std::string& operator_name, c10::DispatchKey key,
                     c10::KernelFunction kernel);

// The operators of the dispatcher, for rules that give many of them a kernel.

// All operators that are defined now.
std::vector<c10::OperatorHandle> all_operators();

}  // namespace foo
