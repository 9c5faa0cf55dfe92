// The Fourier transforms of torch.fft in half precision.

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "aten/wider_dtypes.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

using at::Tensor;
using c10::IValue;

// A Fourier transform of torch.fft, which torch has in half precision on CUDA alone: in float32,
// below the gradients.
class HalfTransform final : public c10::OperatorKernel {
 public:
  explicit HalfTransform(c10::SafeKernelFunction of_torch) : of_torch_(std::move(of_torch)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    IValue& self = (*stack)[stack->size() - op.schema().arguments().size()];
    const at::ScalarType dtype = self.toTensor().scalar_type();
    if (dtype != at::kHalf && dtype != at::kComplexHalf) {
      of_torch_.callBoxed(op, keys, stack);
      return;
    }
    self = self.toTensor().to(at::toOpMathType(dtype));
    if (!op.schema().arguments().back().is_out()) {
      op.callBoxed(stack);
      stack->back() = narrow(stack->back().toTensor());
      return;
    }
    const Tensor out = stack->back().toTensor();
    stack->pop_back();
    c10::Dispatcher::singleton()
        .findSchemaOrThrow(op.operator_name().name.c_str(), "")
        .callBoxed(stack);
    const Tensor result = narrow(stack->back().toTensor());
    at::native::resize_output(out, result.sizes());
    stack->back() = out.copy_(result);
  }

 private:
  static Tensor narrow(const Tensor& result) {
    return result.to(result.is_complex() ? at::kComplexHalf : at::kHalf);
  }

  c10::SafeKernelFunction of_torch_;
};

// Whether it is a transform along dimensions, such as aten::fft_rfft2.out.
bool is_transform(const c10::OperatorHandle& op) {
  std::string_view name = op.operator_name().name;
  if (!name.starts_with("aten::fft_")) return false;
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::Argument& argument) { return argument.name() == "norm"; });
}

void register_transform(const c10::OperatorHandle& op) {
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto of_torch = op.getComputedKernelForDispatchKey(key);
    register_kernel(c10::toString(op.operator_name()), key,
                    c10::KernelFunction::makeFromBoxedFunctor(
                        std::make_unique<HalfTransform>(std::move(of_torch))));
  }
}

}  // namespace

void register_half_transforms(c10::ArrayRef<c10::OperatorHandle> operators) {
  for (const c10::OperatorHandle& op : operators) {
    if (is_transform(op)) register_transform(op);
  }
}

}  // namespace foo::aten
