// torch sends the convolutions of a device like foo to operators that only such a device
// implements. The CPU has the general ones.

#include <ATen/core/stack.h>
#include <torch/library.h>

#include "aten/fallback.h"

namespace foo::aten {
namespace {

void convolution(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const auto general =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  call_on_host(general, keys, stack);
}

// The general operator has one argument more, bias_sizes, after the weight.
void convolution_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                          torch::jit::Stack* stack) {
  static const auto general =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const size_t grad_output = stack->size() - op.schema().arguments().size();
  const int64_t output_channels = (*stack)[grad_output].toTensor().size(1);
  stack->insert(stack->begin() + grad_output + 3, c10::List<int64_t>({output_channels}));
  call_on_host(general, keys, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace foo::aten
