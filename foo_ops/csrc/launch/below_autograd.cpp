#include "launch/below_autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "launch/parameter.h"

namespace foo {
namespace {

using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

bool requires_grad(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

bool is_dual(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Whether the predicate holds for a tensor, or for any tensor of a list.
template <class Predicate>
bool any_tensor(const IValue& argument, const Predicate& predicate) {
  if (argument.isTensor()) return predicate(argument.toTensor());
  if (argument.isTensorList()) {
    const auto tensors = argument.toTensorList();
    return std::any_of(tensors.begin(), tensors.end(), predicate);
  }
  if (argument.isOptionalTensorList()) {
    const auto tensors = argument.toOptionalTensorList();
    return std::any_of(tensors.begin(), tensors.end(), [&](const std::optional<at::Tensor>& it) {
      return it.has_value() && predicate(*it);
    });
  }
  return false;
}

}  // namespace

bool needs_gradient(const OperatorHandle& op, const Stack& stack) {
  const auto arguments = arguments_of(op, stack);
  return at::GradMode::is_enabled() &&
         std::any_of(arguments.begin(), arguments.end(),
                     [](const IValue& argument) { return any_tensor(argument, requires_grad); });
}

bool has_tangent(const OperatorHandle& op, const Stack& stack) {
  const auto arguments = arguments_of(op, stack);
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const IValue& argument) { return any_tensor(argument, is_dual); });
}

std::vector<at::Tensor> written_tensors(const OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = arguments_of(op, stack);
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for_each_tensor(values[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_inference()) written.push_back(tensor);
    });
  }
  return written;
}

void redispatch_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace foo
