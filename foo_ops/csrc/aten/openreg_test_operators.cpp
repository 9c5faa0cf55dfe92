// Two operators for tests, made with torch::autograd::Function in C++. The tests of torch_openreg,
// PyTorch's example of a device outside of its tree, call operators of these names in the device's
// namespace, eagerly and under torch.compile; tests/device/test_custom_autograd.py does so here.
// AOTAutograd tells apart a Function that returns its input and one that returns a view of it, so
// there is one of each. Both halve the gradient, which shows that the Function's backward ran.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace foo {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

variable_list half_of(const variable_list& grad_outputs) {
  const at::Tensor& grad_output = grad_outputs.front();
  return {grad_output.defined() ? grad_output * 0.5 : grad_output};
}

struct ReturnsSelf : torch::autograd::Function<ReturnsSelf> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& input) { return input; }
  static variable_list backward(AutogradContext*, const variable_list& grad_outputs) {
    return half_of(grad_outputs);
  }
};

struct Aliasing : torch::autograd::Function<Aliasing> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& input) {
    return input.view_symint(input.sym_sizes());
  }
  static variable_list backward(AutogradContext*, const variable_list& grad_outputs) {
    return half_of(grad_outputs);
  }
};

}  // namespace

// Without a dispatch key: composites of the operators that they call, for every device.
TORCH_LIBRARY_FRAGMENT(foo, library) {
  library.def("custom_autograd_fn_returns_self(Tensor(a) input) -> Tensor(a)",
              [](const at::Tensor& input) { return ReturnsSelf::apply(input); });
  library.def("custom_autograd_fn_aliasing(Tensor(a) input) -> Tensor(a)",
              [](const at::Tensor& input) { return Aliasing::apply(input); });
}

}  // namespace foo
