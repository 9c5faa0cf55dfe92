// Finds operators by their names: to register kernels for them, and to call them.

#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace foo {

// Suppresses warnings of this thread during its lifetime, for kernels that ours replace on purpose.
class NoWarnings {
  class Handler final : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };

  Handler silent_;
  const c10::WarningUtils::WarningHandlerGuard handler_{&silent_};
  // A TORCH_WARN_ONCE must not be used up here.
  const c10::WarningUtils::WarnAlways always_;
};

using Registrations = std::vector<c10::RegistrationHandleRAII>;

// Returns the operator with a name such as "foo::abs.out"; raises if there is none.
c10::OperatorHandle find_operator(const std::string& name);

// Returns the name for messages, without namespace and overload: "abs".
std::string short_name(const std::string& operator_name);

// Whether this package has ever registered a C++ kernel for the operator, as opposed to a Python
// one made of other operators.
bool has_native_kernel(const std::string& operator_name);

// Returns the kernel that an operator's author has registered for autograd of all tensors, with
// torch.library.register_autograd for example. There must be one.
c10::SafeKernelFunction kernel_of_autograd(const c10::OperatorHandle& op);

// Registers a kernel until the returned handle is destroyed.
c10::RegistrationHandleRAII hold_kernel(const std::string& operator_name, c10::DispatchKey key,
                                        c10::KernelFunction kernel);

// Registers a kernel for the rest of the process.
void register_kernel(const std::string& operator_name, c10::DispatchKey key,
                     c10::KernelFunction kernel);

// Returns all operators that are defined now, for rules that give many of them a kernel.
std::vector<c10::OperatorHandle> all_operators();

// If the conjugate or negative bit of a written argument is set, makes the operator write to a
// copy, which is then copied back. PyTorch's own fallback assumes that such an operator returns
// what it writes, and otherwise frees memory that it does not own.
Registrations resolve_math_bits(const std::string& operator_name);

// Registers a kernel that calls another operator, ``of``. The operator takes the arguments of
// ``of`` first, then optional tensors named "<argument>_number", which replace these arguments:
// compiled programs pass floating-point numbers as tensors.
c10::RegistrationHandleRAII register_tensor_numbers(const std::string& operator_name,
                                                    c10::DispatchKey key, const std::string& of);

// A call with arguments that are known by their names. All others have their defaults, so that
// callers need not know them.
class NamedCall {
 public:
  NamedCall(const std::string& operator_name, const std::vector<std::string>& arguments);

  // Calls the operator and returns its results. The values are those of the named arguments, in
  // their order.
  torch::jit::Stack operator()(std::vector<c10::IValue> values) const;

 private:
  c10::OperatorHandle operator_;
  torch::jit::Stack defaults_;
  std::vector<int64_t> places_;
};

}  // namespace foo
