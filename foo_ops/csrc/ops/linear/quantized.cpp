#include "ops/linear/quantized.h"

#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "launch/kernel_table.h"
#include "launch/operator_counts.h"
#include "launch/symbols.h"
#include "ops/linear/linear.h"
#include "ops/linear/product.h"

namespace foo {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_weight(const char* name, const at::Tensor& weight, at::ScalarType dtype,
                  const char* shape, const at::Tensor& input) {
  check_dimensions(name, "weight", weight, 2, shape);
  TORCH_CHECK_VALUE(weight.device() == input.device(), name, ": weight must be on ", input.device(),
                    " as input is, got ", weight.device());
  TORCH_CHECK_TYPE(weight.scalar_type() == dtype, name, ": weight must be ", dtype_name(dtype),
                   ", got ", dtype_name(weight.scalar_type()));
}

void check_of_rows(const char* name, const char* argument, const at::Tensor& tensor,
                   const at::Tensor& input, const at::Tensor& weight) {
  check_dimensions(name, argument, tensor, 1, "(N)");
  check_like(name, argument, tensor, "input", input);
  check_count(name, argument, "elements", tensor.sym_size(0), weight.sym_size(0),
              "weight has rows");
}

void check_of_groups(const char* name, const char* argument, const at::Tensor& tensor,
                     const at::Tensor& input, const at::Tensor& weight, int64_t group_size) {
  check_dimensions(name, argument, tensor, 2, "(N, K / group_size)");
  check_like(name, argument, tensor, "input", input);
  check_count(name, argument, "rows", tensor.sym_size(0), weight.sym_size(0), "weight has");
  check_count(name, argument, "columns", tensor.sym_size(1), input.sym_size(-1) / group_size,
              "input has groups");
}

// Kernels need contiguous rows of weights, scales and zeros; those for few rows also of the input.
at::Tensor with_adjacent_steps(const at::Tensor& matrix) {
  return matrix.size(-1) <= 1 || matrix.stride(-1) == 1 ? matrix : matrix.contiguous();
}

at::Tensor multiply_quantized(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& scale, const OptionalTensor& zero,
                              const OptionalTensor& bias, int64_t group_size, Kernel& few_rows,
                              Kernel& many_rows) {
  const at::Tensor output = make_rows(input, weight.size(0));
  if (output.numel() == 0) return output;
  const bool is_few = output.numel() <= kFewRows * weight.size(0);
  const Matrix left(is_few ? with_adjacent_steps(input) : input);
  const Matrix right(with_adjacent_steps(weight));
  const bool has_groups = zero.has_value();
  const at::Tensor scales = has_groups ? with_adjacent_steps(scale) : scale;
  const at::Tensor zeros = has_groups ? with_adjacent_steps(*zero) : at::Tensor();
  const QuantizedProduct product{.product = make_product(output, left, right, bias),
                                 .scale = scales.const_data_ptr(),
                                 .scale_column_stride = scales.stride(0),
                                 .zero = has_groups ? zeros.const_data_ptr() : nullptr,
                                 .zero_column_stride = has_groups ? zeros.stride(0) : 0,
                                 .group_size = group_size};
  Kernel& kernel_of_size = is_few ? few_rows : many_rows;
  auto* const kernel = kernel_of_size.get<QuantizedFunction>(output.scalar_type());
  const Cut cut = is_few ? cut_of_few_rows(product.product)
                         : cut_of_blocks(product.product, output.scalar_type(), 1);
  run_all<QuantizedProduct>({{product, kernel, cut}});
  return output;
}

at::Tensor linear_int8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const OptionalTensor& bias) {
  static auto* const few_rows = new Kernel("linear_int8_few_rows");
  static auto* const many_rows = new Kernel("linear_int8_product");
  check_linear_int8(input, weight, scale, bias);
  return multiply_quantized(input, weight, scale, std::nullopt, bias, 0, *few_rows, *many_rows);
}

// Returns the few-rows kernel that is compiled for a group size.
Kernel& few_rows_int4_kernel(int64_t group_size) {
  static auto* const of_32 = new Kernel("linear_int4_few_rows.32");
  static auto* const of_64 = new Kernel("linear_int4_few_rows.64");
  static auto* const of_128 = new Kernel("linear_int4_few_rows.128");
  return *(group_size == 32 ? of_32 : group_size == 64 ? of_64 : of_128);
}

at::Tensor linear_int4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const at::Tensor& zero, const OptionalTensor& bias, int64_t group_size) {
  static auto* const many_rows = new Kernel("linear_int4_product");
  check_linear_int4(input, weight, scale, zero, bias, group_size);
  return multiply_quantized(input, weight, scale, zero, bias, group_size,
                            few_rows_int4_kernel(group_size), *many_rows);
}

}  // namespace

void check_linear_int8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const OptionalTensor& bias) {
  const char* const name = "linear_int8";
  check_dtype(name, "input", input);
  check_rows(name, "input", input);
  check_weight(name, weight, at::kChar, "(N, K)", input);
  check_count(name, "weight", "columns", weight.sym_size(1), input.sym_size(-1), "input has");
  check_of_rows(name, "scale", scale, input, weight);
  if (bias.has_value()) check_of_rows(name, "bias", *bias, input, weight);
}

void check_linear_int4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const at::Tensor& zero, const OptionalTensor& bias, int64_t group_size) {
  const char* const name = "linear_int4";
  check_dtype(name, "input", input);
  check_rows(name, "input", input);
  TORCH_CHECK_VALUE(group_size == 32 || group_size == 64 || group_size == 128, name,
                    ": group_size must be 32, 64 or 128, got ", group_size);
  TORCH_CHECK_VALUE(holds((input.sym_size(-1) % group_size).sym_eq(0)), name,
                    ": input must have whole groups of ", group_size, " columns, got ",
                    input.sym_size(-1));
  check_weight(name, weight, at::kByte, "(N, K / 2)", input);
  check_count(name, "weight", "columns", weight.sym_size(1), input.sym_size(-1) / 2,
              "input has pairs of columns");
  check_of_groups(name, "scale", scale, input, weight, group_size);
  check_of_groups(name, "zero", zero, input, weight, group_size);
  if (bias.has_value()) check_of_rows(name, "bias", *bias, input, weight);
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_shared_kernel<"foo::linear_int8", &linear_int8>(library);
  register_shared_kernel<"foo::linear_int4", &linear_int4>(library);
}

}  // namespace foo
