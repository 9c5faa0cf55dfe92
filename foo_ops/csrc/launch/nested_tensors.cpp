#include "launch/nested_tensors.h"

#include "launch/parameter.h"
#include "launch/registration.h"

namespace foo {

namespace {

// It stands for all keys of nested tensors that have no kernel of their own, and goes before the
// composites of autograd. Jagged tensors in inference mode look for it, too.
constexpr auto kNestedKey = c10::DispatchKey::CompositeImplicitAutogradNestedTensor;

// The argument that is nested, or has such a tensor in its list.
std::string nested_argument(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& parameters = op.schema().arguments();
  const auto arguments = torch::jit::last(stack, parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    bool is_nested = false;
    for_each_tensor(arguments[i],
                    [&](const at::Tensor& tensor) { is_nested |= tensor.is_nested(); });
    if (is_nested) return parameters[i].name();
  }
  return "an argument";
}

[[noreturn]] void refuse(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, short_name(op.operator_name().name), ": ",
                              nested_argument(op, stack),
                              " must be a dense tensor, got a nested one");
}

// Lets a kernel of rows go first, which tensors of inference mode don't come to themselves.
void refuse_unless_of_rows(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) {
  constexpr auto nested = c10::DispatchKey::AutogradNestedTensor;
  if (!op.hasKernelForDispatchKey(nested)) refuse(op, *stack);
  op.getComputedKernelForDispatchKey(nested).callBoxed(op, keys, stack);
}

// Lets what its author has registered for autograd of all tensors go first, too.
void refuse_unless_registered(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                              torch::jit::Stack* stack) {
  constexpr auto nested = c10::DispatchKey::AutogradNestedTensor;
  if (!op.hasKernelForDispatchKey(nested) && keys.has(nested) &&
      op.hasKernelForDispatchKey(c10::DispatchKey::Autograd)) {
    kernel_of_autograd(op).callBoxed(op, keys, stack);
  } else {
    refuse_unless_of_rows(op, keys, stack);
  }
}

}  // namespace

std::vector<c10::RegistrationHandleRAII> refuse_nested_tensors(const std::string& operator_name) {
  std::vector<c10::RegistrationHandleRAII> registrations;
  if (!find_operator(operator_name).hasKernelForDispatchKey(kNestedKey)) {
    registrations.push_back(
        hold_kernel(operator_name, kNestedKey,
                    c10::KernelFunction::makeFromBoxedFunction<&refuse_unless_registered>()));
  }
  return registrations;
}

void refuse_nested_tensors(torch::Library& library, const char* operator_name) {
  library.impl(
      operator_name,
      torch::dispatch(kNestedKey,
                      torch::CppFunction::makeFromBoxedFunction<&refuse_unless_of_rows>()));
}

}  // namespace foo
