#include "launch/nested_tensors.h"

#include "launch/parameter.h"
#include "launch/registration.h"

namespace foo {

namespace {

constexpr auto kNestedKeys = {c10::DispatchKey::AutogradNestedTensor,
                              c10::DispatchKey::NestedTensorCPU,
                              c10::DispatchKey::NestedTensorPrivateUse1};

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

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, short_name(op.operator_name().name), ": ",
                              nested_argument(op, *stack),
                              " must be a dense tensor, got a nested one");
}

}  // namespace

std::vector<c10::RegistrationHandleRAII> refuse_nested_tensors(const std::string& operator_name) {
  std::vector<c10::RegistrationHandleRAII> registrations;
  for (const auto key : kNestedKeys) {
    registrations.push_back(
        hold_kernel(operator_name, key, c10::KernelFunction::makeFromBoxedFunction<&refuse>()));
  }
  return registrations;
}

void refuse_nested_tensors(torch::Library& library, const char* operator_name) {
  for (const auto key : kNestedKeys) {
    library.impl(operator_name,
                 torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&refuse>()));
  }
}

}  // namespace foo
