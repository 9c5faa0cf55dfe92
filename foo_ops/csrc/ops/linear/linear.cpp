#include "ops/linear/linear.h"

#include <ATen/ops/ones.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <string_view>
#include <tuple>
#include <utility>

#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "launch/registration.h"
#include "launch/symbols.h"
#include "ops/linear/product.h"

namespace foo {

void check_dtype(const char* name, const char* argument, const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      name, ": ", argument, " must be float16, bfloat16, float32 or float64, got ",
      dtype_name(dtype));
}

void check_rows(const char* name, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.dim() >= 1, name, ": ", argument,
                    " must have at least 1 dimension, got 0");
}

void check_dimensions(const char* name, const char* argument, const at::Tensor& tensor,
                      int64_t dimensions, const char* shape) {
  TORCH_CHECK_VALUE(tensor.dim() == dimensions, name, ": ", argument, " must have ", dimensions,
                    dimensions == 1 ? " dimension " : " dimensions ", shape, ", got ",
                    tensor.dim());
}

void check_like(const char* name, const char* argument, const at::Tensor& tensor, const char* of,
                const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), name, ": ", argument, " must be on ",
                    like.device(), " as ", of, " is, got ", tensor.device());
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name, ": ", argument, " must be ",
                   dtype_name(like.scalar_type()), " as ", of, " is, got ",
                   dtype_name(tensor.scalar_type()));
}

void check_count(const char* name, const char* argument, const char* what, const c10::SymInt& size,
                 const c10::SymInt& expected, const char* as) {
  TORCH_CHECK_VALUE(holds(size.sym_eq(expected)), name, ": ", argument, " must have ", expected,
                    " ", what, " as ", as, ", got ", size);
}

void check_one_each(const char* name, const char* argument, const char* what,
                    const c10::SymInt& size, const c10::SymInt& expected, const char* each) {
  TORCH_CHECK_VALUE(holds(size.sym_eq(expected)), name, ": ", argument, " must have ", expected,
                    " ", what, ", one for each ", each, ", got ", size);
}

namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias) {
  check_linear(input, weight, bias);
  const at::Tensor output = make_rows(input, weight.size(0));
  multiply(output, Matrix(input), Matrix(weight), bias);
  return output;
}

Finish finish_of(std::string_view activation) {
  constexpr std::array<std::pair<std::string_view, Finish>, 4> known = {
      {{"relu", Finish::kRelu},
       {"silu", Finish::kSilu},
       {"gelu", Finish::kGelu},
       {"gelu_tanh", Finish::kGeluTanh}}};
  for (const auto& [name, finish] : known) {
    if (activation == name) return finish;
  }
  TORCH_CHECK_VALUE(false, "linear: activation must be relu, silu, gelu or gelu_tanh, got ",
                    activation);
}

at::Tensor linear_activation(const at::Tensor& input, const at::Tensor& weight,
                             const OptionalTensor& bias, std::string_view activation) {
  check_linear_activation(input, weight, bias, activation);
  const at::Tensor output = make_rows(input, weight.size(0));
  multiply(output, Matrix(input), Matrix(weight), bias, finish_of(activation));
  return output;
}

at::Tensor linear_silu_mul(const at::Tensor& input, const at::Tensor& gate_weight,
                           const at::Tensor& up_weight) {
  check_linear_silu_mul(input, gate_weight, up_weight);
  Matrix gate(gate_weight), up(up_weight);
  if (!gate.lies_as(up)) {
    gate = Matrix(gate_weight.contiguous());
    up = Matrix(up_weight.contiguous());
  }
  const at::Tensor output = make_rows(input, gate.rows());
  multiply(output, Matrix(input), gate, std::nullopt, Finish::kSiluMul, &up);
  return output;
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Gradients that are not required have no elements.
Gradients linear_backward(const at::Tensor& grad_output, const OptionalTensor& input,
                          const OptionalTensor& weight, bool input_requires_grad,
                          bool weight_requires_grad, bool bias_requires_grad) {
  check_linear_backward(grad_output, input, weight, input_requires_grad, weight_requires_grad);
  const Matrix grad(grad_output);
  const auto make = [&](bool is_wanted, c10::IntArrayRef sizes) {
    return new_tensor(is_wanted ? sizes : c10::IntArrayRef{0}, grad_output.options());
  };
  const at::Tensor grad_input =
      input_requires_grad ? make_rows(grad_output, weight->size(1)) : make(false, {});
  if (input_requires_grad) {
    multiply(grad_input, grad, Matrix(*weight).transposed());
  }
  const at::Tensor grad_weight =
      make(weight_requires_grad, {grad.width(), weight_requires_grad ? input->size(-1) : 0});
  if (weight_requires_grad) {
    multiply(grad_weight, grad.transposed(), Matrix(*input).transposed());
  }
  const at::Tensor grad_bias = make(bias_requires_grad, {grad.width()});
  if (bias_requires_grad) {
    const at::Tensor one = at::ones({1}, grad_output.options());
    multiply(grad_bias, Matrix(one, grad.rows()), grad.transposed());
  }
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

void check_linear(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias) {
  const char* const name = "linear";
  check_dtype(name, "input", input);
  check_rows(name, "input", input);
  check_dimensions(name, "weight", weight, 2, "(N, K)");
  check_like(name, "weight", weight, "input", input);
  check_count(name, "weight", "columns", weight.sym_size(1), input.sym_size(-1), "input has");
  if (bias.has_value()) {
    check_dimensions(name, "bias", *bias, 1, "(N)");
    check_like(name, "bias", *bias, "input", input);
    check_one_each(name, "bias", "elements", bias->sym_size(0), weight.sym_size(0),
                   "row of weight");
  }
}

void check_linear_activation(const at::Tensor& input, const at::Tensor& weight,
                             const OptionalTensor& bias, std::string_view activation) {
  check_linear(input, weight, bias);
  finish_of(activation);
}

void check_linear_silu_mul(const at::Tensor& input, const at::Tensor& gate_weight,
                           const at::Tensor& up_weight) {
  const char* const name = "linear_silu_mul";
  check_dtype(name, "input", input);
  check_rows(name, "input", input);
  for (const auto& [argument, weight] :
       {std::pair("gate_weight", gate_weight), {"up_weight", up_weight}}) {
    check_dimensions(name, argument, weight, 2, "(N, K)");
    check_like(name, argument, weight, "input", input);
    check_count(name, argument, "columns", weight.sym_size(1), input.sym_size(-1), "input has");
  }
  check_count(name, "up_weight", "rows", up_weight.sym_size(0), gate_weight.sym_size(0),
              "gate_weight has");
}

void check_linear_backward(const at::Tensor& grad_output, const OptionalTensor& input,
                           const OptionalTensor& weight, bool input_requires_grad,
                           bool weight_requires_grad) {
  const char* const name = "linear_backward";
  check_dtype(name, "grad_output", grad_output);
  check_rows(name, "grad_output", grad_output);
  TORCH_CHECK_VALUE(weight.has_value() || !input_requires_grad, name,
                    ": weight must be given if input_requires_grad is true, got None");
  TORCH_CHECK_VALUE(input.has_value() || !weight_requires_grad, name,
                    ": input must be given if weight_requires_grad is true, got None");
  if (weight.has_value()) {
    check_dimensions(name, "weight", *weight, 2, "(N, K)");
    check_like(name, "weight", *weight, "grad_output", grad_output);
    check_one_each(name, "weight", "rows", weight->sym_size(0), grad_output.sym_size(-1),
                   "column of grad_output");
  }
  if (input.has_value()) {
    check_like(name, "input", *input, "grad_output", grad_output);
    const auto sizes = input->sym_sizes(), expected = grad_output.sym_sizes();
    TORCH_CHECK_VALUE(
        input->dim() == grad_output.dim() &&
            have_sizes(sizes.slice(0, input->dim() - 1), expected.slice(0, input->dim() - 1)),
        name, ": input must have the leading dimensions ", expected.slice(0, grad_output.dim() - 1),
        " as grad_output has, got ", sizes);
    if (weight.has_value()) {
      check_count(name, "input", "columns", input->sym_size(-1), weight->sym_size(1), "weight has");
    }
  }
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_shared_kernel<"foo::linear", &linear>(library);
  register_shared_kernel<"foo::linear_backward", &linear_backward>(library);
  register_shared_kernel<"foo::linear_activation", &linear_activation>(library);
  register_shared_kernel<"foo::linear_silu_mul", &linear_silu_mul>(library);
}

}  // namespace foo
