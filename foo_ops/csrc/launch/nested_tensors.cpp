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

// Where gradients are not recorded, tensors don't come to the kernel of autograd's key themselves.
void refuse_unless_registered(const c10::OperatorHandle& op, c10::DispatchKeySet,
                              torch::jit::Stack* stack) {
  constexpr auto own_key = c10::DispatchKey::AutogradNestedTensor;
  if (op.hasKernelForDispatchKey(own_key)) {
    op.getComputedKernelForDispatchKey(own_key).callBoxed(op, c10::DispatchKeySet(own_key), stack);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, short_name(op.operator_name().name), ": ",
                              nested_argument(op, *stack),
                              " must be a dense tensor, got a nested one");
}

c10::KernelFunction refusal() {
  return c10::KernelFunction::makeFromBoxedFunction<&refuse_unless_registered>();
}

}  // namespace

c10::RegistrationHandleRAII refuse_nested_tensors(const std::string& operator_name) {
  return hold_kernel(operator_name, kNestedKey, refusal());
}

void refuse_nested_tensors(torch::Library& library, const char* operator_name) {
  library.impl(
      operator_name,
      torch::dispatch(kNestedKey,
                      torch::CppFunction::makeFromBoxedFunction<&refuse_unless_registered>()));
}

}  // namespace foo
