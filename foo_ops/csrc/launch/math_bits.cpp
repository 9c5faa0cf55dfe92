#include "launch/math_bits.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>

#include <memory>
#include <utility>
#include <vector>

#include "launch/registration.h"

namespace foo {

namespace {

// Pairs of a tensor with a bit set and its resolved copy.
using Replaced = std::vector<std::pair<at::Tensor, at::Tensor>>;

at::Tensor resolved(const at::Tensor& tensor, Replaced& replaced) {
  if (!tensor.defined() || !(tensor.is_conj() || tensor.is_neg())) return tensor;
  // A tensor that is passed twice must stay one tensor.
  for (const auto& [original, copy] : replaced) {
    if (original.is_same(tensor)) return copy;
  }
  replaced.emplace_back(tensor, tensor.resolve_conj().resolve_neg());
  return replaced.back().second;
}

c10::IValue resolved(const c10::IValue& value, Replaced& replaced) {
  if (value.isTensor()) return resolved(value.toTensor(), replaced);
  if (!value.isTensorList()) return value;
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& tensor : value.toTensorVector()) {
    tensors.push_back(resolved(tensor, replaced));
  }
  return tensors;
}

class ResolvingMathBits final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto& arguments = op.schema().arguments();
    const size_t first = stack->size() - arguments.size();
    Replaced written, read;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* const alias = arguments[i].alias_info();
      const bool is_written = alias != nullptr && alias->isWrite();
      c10::IValue& value = (*stack)[first + i];
      value = resolved(value, is_written ? written : read);
    }
    constexpr auto kLast = c10::DispatchKey::Conjugate;
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kLast), stack);
    const size_t results = stack->size() - op.schema().returns().size();
    for (const auto& [original, copy] : written) {
      at::native::resize_output(original, copy.sizes());
      original.copy_(copy);
      for (size_t i = results; i < stack->size(); ++i) {
        c10::IValue& result = (*stack)[i];
        if (result.isTensor() && result.toTensor().is_same(copy)) result = original;
      }
    }
  }
};

}  // namespace

Registrations resolve_math_bits(const std::string& operator_name) {
  Registrations registrations;
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    registrations.push_back(hold_kernel(
        operator_name, key,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<ResolvingMathBits>())));
  }
  return registrations;
}

}  // namespace foo
