// foo::linear_int8, foo::linear_fp8, foo::linear_int4, foo::linear_mxfp4, foo::linear_table4 and
// foo::linear_silu_mul_quantized: their checks, which fake kernels share, and their kernels'
// parameters. tests/project/test_agreement.py compares the struct with foo_ops/kernels/linear.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string>

#include "launch/kernel_table.h"
#include "ops/linear/product.h"

namespace foo {

// A product whose right matrix has integers or floating-point numbers of 8 bits, with a scale per
// column or per group of steps; or integers of 4 bits, two in a byte, with scale and zero per
// group; or numbers of 4 bits, whose scale is the exponent of a group; or codes of 4 bits, whose
// numbers are in a table. Strides are in elements; a column's groups are adjacent.
struct QuantizedProduct {
  Product product;
  const void* scale;
  int64_t scale_column_stride;
  const void* zero;
  int64_t zero_column_stride, group_size;
  const void* table;
};

template <>
struct Layout<QuantizedProduct> {
  using Struct = QuantizedProduct;
  static constexpr const char* name = "QuantizedProduct";
  static constexpr Field fields[] =
      FOO_FIELDS(product, scale, scale_column_stride, zero, zero_column_stride, group_size, table);
};
static_assert(is_whole<QuantizedProduct>());

inline const Product& matrices_of(const QuantizedProduct& product) {
  return product.product;
}

using QuantizedFunction = void(const QuantizedProduct* product, const ProductBlock* block,
                               void* scratch, int64_t* bytes);

// Integers of 8 bits, or of 4 bits if there are zeros; codes of 4 bits if there is a table; MXFP4
// if scales are exponents, and otherwise float8_e4m3fn if weights are bytes without sign: of one
// matrix, or of one for each group of rows. The steps of a column are adjacent, and so are its
// groups; the group size is 0 if a column has one scale.
struct QuantizedWeights {
  at::Tensor weight, scale;
  std::optional<at::Tensor> zero;
  int64_t group_size;
  std::optional<at::Tensor> table = std::nullopt;

  bool has_groups() const { return group_size != 0; }
  bool are_fp8() const {
    return weight.scalar_type() == at::kByte && !zero.has_value() && !are_mxfp4();
  }
  bool are_mxfp4() const { return is_exponent(scale); }
  static bool is_exponent(const at::Tensor& scale) { return scale.scalar_type() == at::kByte; }
};

// Numbers of MXFP4 that share a scale.
constexpr int64_t kMxfp4GroupSize = 32;

// The few-rows kernels that are compiled for each group size.
struct GroupKernels {
  Kernel of_32, of_64, of_128;

  explicit GroupKernels(const std::string& name)
      : of_32(name + ".32"), of_64(name + ".64"), of_128(name + ".128") {}

  Kernel& of(int64_t group_size) {
    return group_size == 32 ? of_32 : group_size == 64 ? of_64 : of_128;
  }
};

// Kernels need contiguous rows of weights, scales and zeros; those for few rows also of the input.
at::Tensor with_adjacent_steps(const at::Tensor& matrix);

// Copies tensors in which steps or groups of a column are not adjacent.
QuantizedWeights make_quantized_weights(const at::Tensor& weight, const at::Tensor& scale,
                                        const std::optional<at::Tensor>& zero, int64_t group_size);

// Returns the number of steps that share a scale of 8-bit integers, or 0 for one scale per column.
int64_t group_size_of_bytes(const at::Tensor& weight, const at::Tensor& scale);

// Describes a product for kernels: with the integers of one group if they are of several.
QuantizedProduct quantized_product(const Product& product, const QuantizedWeights& weights,
                                   int64_t group);

// Returns the call that multiplies by weights of integers, those of one group if they are of
// several; cut into at least `least` blocks.
ProductCall<QuantizedProduct> quantized_call(const Product& product,
                                             const QuantizedWeights& weights, int64_t group,
                                             at::ScalarType dtype, int64_t least);

// Checks that groups are of 32, 64 or 128 steps; `of` says whose steps.
void check_groups(const char* name, const char* argument, const c10::SymInt& groups,
                  const c10::SymInt& steps, const std::string& of);

// Checks the device and dtype of scales of the compute type, which float8_e4m3fn has.
void check_wide_scale(const char* name, const char* argument, const at::Tensor& scale,
                      const char* of, const at::Tensor& input);

// Checks the shape, device and dtype of E8M0 scales.
void check_exponents(const char* name, const char* argument, const at::Tensor& scale,
                     int64_t dimensions, const char* shape, const char* like,
                     const at::Tensor& input);

// Checks of the operators' arguments. They raise, and read only metadata.
void check_linear_int8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const std::optional<at::Tensor>& bias, std::optional<int64_t> activations,
                       bool by_section);
void check_linear_int4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const at::Tensor& zero, const std::optional<at::Tensor>& bias,
                       int64_t group_size, std::optional<int64_t> activations, bool by_section);
void check_linear_silu_mul_quantized(const at::Tensor& input, const at::Tensor& weight,
                                     const at::Tensor& scale, const std::optional<at::Tensor>& zero,
                                     std::optional<int64_t> activations, bool by_section);
// Weights are codes of float8_e4m3fn; scales are of the compute type.
void check_linear_fp8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                      const std::optional<at::Tensor>& bias);
void check_linear_mxfp4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                        const std::optional<at::Tensor>& bias);
// Scales and the table are of the compute type.
void check_linear_table4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                         const at::Tensor& table, const std::optional<at::Tensor>& bias);

}  // namespace foo
