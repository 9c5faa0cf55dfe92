#include "ops/linear/quantized.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include "launch/kernel_table.h"
#include "launch/registration.h"
#include "launch/symbols.h"
#include "ops/linear/integer.h"
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
  check_one_each(name, argument, "elements", tensor.sym_size(0), weight.sym_size(0),
                 "row of weight");
}

void check_group_sizes(const char* name, const char* argument, const at::Tensor& tensor,
                       const at::Tensor& input, const at::Tensor& weight, int64_t group_size) {
  check_count(name, argument, "rows", tensor.sym_size(0), weight.sym_size(0), "weight has");
  check_one_each(name, argument, "columns", tensor.sym_size(1), input.sym_size(-1) / group_size,
                 "group of input");
}

void check_of_groups(const char* name, const char* argument, const at::Tensor& tensor,
                     const at::Tensor& input, const at::Tensor& weight, int64_t group_size) {
  check_dimensions(name, argument, tensor, 2, "(N, K / group_size)");
  check_like(name, argument, tensor, "input", input);
  check_group_sizes(name, argument, tensor, input, weight, group_size);
}

// Two weights of 4 bits share a byte.
void check_pairs(const char* name, const at::Tensor& input, const at::Tensor& weight,
                 int64_t group_size) {
  TORCH_CHECK_VALUE(holds((input.sym_size(-1) % group_size).sym_eq(0)), name,
                    ": input must have whole groups of ", group_size, " columns, got ",
                    input.sym_size(-1));
  check_weight(name, weight, at::kByte, "(N, K / 2)", input);
  check_one_each(name, "weight", "columns", weight.sym_size(1), input.sym_size(-1) / 2,
                 "two columns of input");
}

// The kernels of weights of 8 bits.
struct ByteKernels {
  Kernel few_rows, product, product_of_groups;
  GroupKernels few_rows_of_groups;

  explicit ByteKernels(const std::string& name)
      : few_rows(name + "_few_rows"),
        product(name + "_product"),
        product_of_groups(name + "_product.groups"),
        few_rows_of_groups(name + "_few_rows") {}

  Kernel& of(int64_t group_size, bool is_few) {
    if (group_size == 0) return is_few ? few_rows : product;
    return is_few ? few_rows_of_groups.of(group_size) : product_of_groups;
  }
};

Kernel& kernel_of(const QuantizedWeights& weights, bool is_few) {
  static auto* const int8 = new ByteKernels("linear_int8");
  static auto* const fp8 = new ByteKernels("linear_fp8");
  static auto* const few_int4 = new GroupKernels("linear_int4_few_rows");
  static auto* const many_int4 = new Kernel("linear_int4_product");
  static auto* const few_mxfp4 = new Kernel("linear_mxfp4_few_rows");
  static auto* const many_mxfp4 = new Kernel("linear_mxfp4_product");
  static auto* const few_table4 = new GroupKernels("linear_table4_few_rows");
  static auto* const many_table4 = new Kernel("linear_table4_product");
  if (weights.table.has_value()) return is_few ? few_table4->of(weights.group_size) : *many_table4;
  if (weights.are_mxfp4()) return is_few ? *few_mxfp4 : *many_mxfp4;
  if (weights.zero.has_value()) return is_few ? few_int4->of(weights.group_size) : *many_int4;
  return (weights.are_fp8() ? fp8 : int8)->of(weights.group_size, is_few);
}

at::Tensor multiply_quantized(const at::Tensor& input, const QuantizedWeights& weights,
                              const OptionalTensor& bias) {
  const at::Tensor output = make_rows(input, weights.weight.size(0));
  if (output.numel() == 0) return output;
  const bool is_few = output.numel() <= kFewRows * weights.weight.size(0);
  const Matrix left(is_few ? with_adjacent_steps(input) : input), right(weights.weight);
  const auto call = quantized_call(make_product(output, left, right, bias), weights, 0,
                                   output.scalar_type(), least_blocks());
  run_or_wait(call, output, left.tensor(), weights.weight, weights.scale, weights.zero,
              weights.table, bias);
  return output;
}

at::Tensor multiply(const at::Tensor& input, const QuantizedWeights& weights,
                    const OptionalTensor& bias, std::optional<int64_t> activations,
                    bool by_section) {
  return activations.has_value() ? multiply_integers(input, weights, bias, by_section)
                                 : multiply_quantized(input, weights, bias);
}

QuantizedWeights weights_of_bytes(const at::Tensor& weight, const at::Tensor& scale) {
  return make_quantized_weights(weight, scale, std::nullopt, group_size_of_bytes(weight, scale));
}

at::Tensor linear_int8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const OptionalTensor& bias, std::optional<int64_t> activations,
                       bool by_section) {
  check_linear_int8(input, weight, scale, bias, activations, by_section);
  return multiply(input, weights_of_bytes(weight, scale), bias, activations, by_section);
}

at::Tensor linear_fp8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                      const OptionalTensor& bias) {
  check_linear_fp8(input, weight, scale, bias);
  return multiply_quantized(input, weights_of_bytes(weight, scale), bias);
}

at::Tensor linear_int4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const at::Tensor& zero, const OptionalTensor& bias, int64_t group_size,
                       std::optional<int64_t> activations, bool by_section) {
  check_linear_int4(input, weight, scale, zero, bias, group_size, activations, by_section);
  return multiply(input, make_quantized_weights(weight, scale, zero, group_size), bias, activations,
                  by_section);
}

// Returns the number of steps that share a scale. Without steps, any size is right.
int64_t group_size_of_pairs(const at::Tensor& input, const at::Tensor& scale) {
  return scale.size(1) == 0 ? 32 : input.size(-1) / scale.size(1);
}

at::Tensor linear_silu_mul_quantized(const at::Tensor& input, const at::Tensor& weight,
                                     const at::Tensor& scale, const OptionalTensor& zero,
                                     std::optional<int64_t> activations, bool by_section) {
  check_linear_silu_mul_quantized(input, weight, scale, zero, activations, by_section);
  const QuantizedWeights weights =
      zero.has_value()
          ? make_quantized_weights(weight, scale, zero, group_size_of_pairs(input, scale))
          : weights_of_bytes(weight, scale);
  if (activations.has_value() && are_integers_packed(input, weights, by_section)) {
    return multiply_packed_integers(input, weights, std::nullopt, by_section, true);
  }
  static const auto gate =
      find_operator("foo::silu_mul").typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  const at::Tensor both = multiply(input, weights, std::nullopt, activations, by_section);
  const int64_t half = weight.size(0) / 2;
  return gate.call(both.narrow(-1, 0, half), both.narrow(-1, half, half));
}

at::Tensor linear_mxfp4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                        const OptionalTensor& bias) {
  check_linear_mxfp4(input, weight, scale, bias);
  return multiply_quantized(
      input, make_quantized_weights(weight, scale, std::nullopt, kMxfp4GroupSize), bias);
}

at::Tensor linear_table4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                         const at::Tensor& table, const OptionalTensor& bias) {
  check_linear_table4(input, weight, scale, table, bias);
  QuantizedWeights weights =
      make_quantized_weights(weight, scale, std::nullopt, group_size_of_pairs(input, scale));
  weights.table = table.contiguous();
  return multiply_quantized(input, weights, bias);
}

const void* group_of(const at::Tensor& tensor, int64_t group) {
  const auto* const data = static_cast<const char*>(tensor.const_data_ptr());
  return data + group * tensor.stride(0) * tensor.itemsize();
}

}  // namespace

QuantizedWeights make_quantized_weights(const at::Tensor& weight, const at::Tensor& scale,
                                        const OptionalTensor& zero, int64_t group_size) {
  QuantizedWeights weights{with_adjacent_steps(weight), scale, zero, group_size};
  if (zero.has_value()) weights.zero = with_adjacent_steps(*zero);
  if (weights.has_groups()) weights.scale = with_adjacent_steps(scale);
  return weights;
}

int64_t group_size_of_bytes(const at::Tensor& weight, const at::Tensor& scale) {
  if (scale.dim() < weight.dim()) return 0;
  // Without steps, any size is right.
  return scale.size(-1) == 0 ? 32 : weight.size(-1) / scale.size(-1);
}

QuantizedProduct quantized_product(const Product& product, const QuantizedWeights& weights,
                                   int64_t group) {
  const auto& [weight, scale, zero, group_size, table] = weights;
  // Strides of a column: the dimension behind that of groups, if there is one.
  const int64_t column = weight.dim() - 2;
  QuantizedProduct quantized{.product = product,
                             .scale = column == 0 ? scale.const_data_ptr() : group_of(scale, group),
                             .scale_column_stride = scale.stride(column),
                             .zero = nullptr,
                             .zero_column_stride = 0,
                             .group_size = group_size,
                             .table = table.has_value() ? table->const_data_ptr() : nullptr};
  if (zero.has_value()) {
    quantized.zero = column == 0 ? zero->const_data_ptr() : group_of(*zero, group);
    quantized.zero_column_stride = zero->stride(column);
  }
  return quantized;
}

ProductCall<QuantizedProduct> quantized_call(const Product& product,
                                             const QuantizedWeights& weights, int64_t group,
                                             at::ScalarType dtype, int64_t least) {
  const bool is_few = product.rows <= kFewRows && product.left_step_stride == 1;
  auto* const kernel = kernel_of(weights, is_few).get<QuantizedFunction>(dtype);
  const Cut cut =
      is_few ? cut_of_few_rows(product, least) : cut_of_blocks(product, dtype, 1, least);
  return {quantized_product(product, weights, group), kernel, cut};
}

namespace {

// `check_scale` checks the device and dtype of the scale.
template <class CheckScale>
void check_8bit(const char* name, const at::Tensor& input, const at::Tensor& weight,
                at::ScalarType dtype, const at::Tensor& scale, const OptionalTensor& bias,
                CheckScale check_scale) {
  check_dtype(name, "input", input);
  check_rows(name, "input", input);
  check_weight(name, weight, dtype, "(N, K)", input);
  check_count(name, "weight", "columns", weight.sym_size(1), input.sym_size(-1), "input has");
  TORCH_CHECK_VALUE(scale.dim() == 1 || scale.dim() == 2, name,
                    ": scale must have 1 dimension (N) or 2 (N, K / group_size), got ",
                    scale.dim());
  check_scale(name, "scale", scale, "input", input);
  if (scale.dim() == 2) {
    check_count(name, "scale", "rows", scale.sym_size(0), weight.sym_size(0), "weight has");
    check_groups(name, "scale", scale.sym_size(1), weight.sym_size(1), "columns of weight");
  } else {
    check_one_each(name, "scale", "elements", scale.sym_size(0), weight.sym_size(0),
                   "row of weight");
  }
  if (bias.has_value()) check_of_rows(name, "bias", *bias, input, weight);
}

}  // namespace

at::Tensor with_adjacent_steps(const at::Tensor& matrix) {
  return matrix.size(-1) <= 1 || matrix.stride(-1) == 1 ? matrix : matrix.contiguous();
}

void check_linear_int8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const OptionalTensor& bias, std::optional<int64_t> activations,
                       bool by_section) {
  check_8bit("linear_int8", input, weight, at::kChar, scale, bias, check_like);
  check_activations("linear_int8", input, scale, activations, by_section);
}

void check_linear_fp8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                      const OptionalTensor& bias) {
  check_8bit("linear_fp8", input, weight, at::kByte, scale, bias, check_wide_scale);
}

void check_wide_scale(const char* name, const char* argument, const at::Tensor& scale,
                      const char* of, const at::Tensor& input) {
  TORCH_CHECK_VALUE(scale.device() == input.device(), name, ": ", argument, " must be on ",
                    input.device(), " as ", of, " is, got ", scale.device());
  const at::ScalarType dtype = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_TYPE(scale.scalar_type() == dtype, name, ": ", argument, " must be ",
                   dtype_name(dtype), " for ", of, " of ", dtype_name(input.scalar_type()),
                   ", got ", dtype_name(scale.scalar_type()));
}

void check_groups(const char* name, const char* argument, const c10::SymInt& groups,
                  const c10::SymInt& steps, const std::string& of) {
  const auto is_of = [&](int64_t size) { return holds((groups * size).sym_eq(steps)); };
  TORCH_CHECK_VALUE(is_of(32) || is_of(64) || is_of(128), name, ": ", argument,
                    " must have a column for each 32, 64 or 128 of the ", steps, " ", of, ", got ",
                    groups);
}

void check_linear_int4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const at::Tensor& zero, const OptionalTensor& bias, int64_t group_size,
                       std::optional<int64_t> activations, bool by_section) {
  const char* const name = "linear_int4";
  check_dtype(name, "input", input);
  check_rows(name, "input", input);
  TORCH_CHECK_VALUE(group_size == 32 || group_size == 64 || group_size == 128, name,
                    ": group_size must be 32, 64 or 128, got ", group_size);
  check_pairs(name, input, weight, group_size);
  check_of_groups(name, "scale", scale, input, weight, group_size);
  check_of_groups(name, "zero", zero, input, weight, group_size);
  if (bias.has_value()) check_of_rows(name, "bias", *bias, input, weight);
  check_activations(name, input, scale, activations, by_section);
}

void check_linear_silu_mul_quantized(const at::Tensor& input, const at::Tensor& weight,
                                     const at::Tensor& scale, const OptionalTensor& zero,
                                     std::optional<int64_t> activations, bool by_section) {
  const char* const name = "linear_silu_mul_quantized";
  if (zero.has_value()) {
    check_dtype(name, "input", input);
    check_rows(name, "input", input);
    check_pairs(name, input, weight, 32);
    check_dimensions(name, "scale", scale, 2, "(N, K / group_size)");
    check_like(name, "scale", scale, "input", input);
    check_count(name, "scale", "rows", scale.sym_size(0), weight.sym_size(0), "weight has");
    check_groups(name, "scale", scale.sym_size(1), input.sym_size(-1), "columns of input");
    check_dimensions(name, "zero", *zero, 2, "(N, K / group_size)");
    check_like(name, "zero", *zero, "input", input);
    check_count(name, "zero", "rows", zero->sym_size(0), weight.sym_size(0), "weight has");
    check_count(name, "zero", "columns", zero->sym_size(1), scale.sym_size(1), "scale has");
  } else {
    check_8bit(name, input, weight, at::kChar, scale, std::nullopt, check_like);
  }
  TORCH_CHECK_VALUE(holds((weight.sym_size(0) % 2).sym_eq(0)), name,
                    ": weight must have an even number of rows, those of the gate and as many of "
                    "up, got ",
                    weight.sym_size(0));
  check_activations(name, input, scale, activations, by_section);
}

void check_linear_mxfp4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                        const OptionalTensor& bias) {
  const char* const name = "linear_mxfp4";
  check_dtype(name, "input", input);
  check_rows(name, "input", input);
  check_pairs(name, input, weight, kMxfp4GroupSize);
  check_exponents(name, "scale", scale, 2, "(N, K / 32)", "input", input);
  check_group_sizes(name, "scale", scale, input, weight, kMxfp4GroupSize);
  if (bias.has_value()) check_of_rows(name, "bias", *bias, input, weight);
}

void check_linear_table4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                         const at::Tensor& table, const OptionalTensor& bias) {
  const char* const name = "linear_table4";
  check_dtype(name, "input", input);
  check_rows(name, "input", input);
  check_pairs(name, input, weight, 32);
  check_dimensions(name, "scale", scale, 2, "(N, K / group_size)");
  check_wide_scale(name, "scale", scale, "input", input);
  check_count(name, "scale", "rows", scale.sym_size(0), weight.sym_size(0), "weight has");
  check_groups(name, "scale", scale.sym_size(1), input.sym_size(-1), "columns of input");
  check_dimensions(name, "table", table, 1, "(16)");
  check_wide_scale(name, "table", table, "input", input);
  check_one_each(name, "table", "elements", table.sym_size(0), 16, "code");
  if (bias.has_value()) check_of_rows(name, "bias", *bias, input, weight);
}

void check_exponents(const char* name, const char* argument, const at::Tensor& scale,
                     int64_t dimensions, const char* shape, const char* like,
                     const at::Tensor& input) {
  check_dimensions(name, argument, scale, dimensions, shape);
  TORCH_CHECK_VALUE(scale.device() == input.device(), name, ": ", argument, " must be on ",
                    input.device(), " as ", like, " is, got ", scale.device());
  TORCH_CHECK_TYPE(QuantizedWeights::is_exponent(scale), name, ": ", argument,
                   " must be uint8, exponents of powers of two, got ",
                   dtype_name(scale.scalar_type()));
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_shared_kernel<"foo::linear_int8", &linear_int8>(library);
  register_shared_kernel<"foo::linear_fp8", &linear_fp8>(library);
  register_shared_kernel<"foo::linear_int4", &linear_int4>(library);
  register_shared_kernel<"foo::linear_silu_mul_quantized", &linear_silu_mul_quantized>(library);
  register_shared_kernel<"foo::linear_mxfp4", &linear_mxfp4>(library);
  register_shared_kernel<"foo::linear_table4", &linear_table4>(library);
}

}  // namespace foo
