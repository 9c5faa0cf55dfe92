// foo::linear_int8 and foo::linear_int4: their checks, which fake kernels share, and their kernels'
// parameters. tests/project/test_agreement.py compares the struct with foo_ops/kernels/linear.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "launch/kernel_table.h"
#include "ops/linear/product.h"

namespace foo {

// A product whose right matrix has integers: 8 bits with a scale per column, or 4 bits, two in a
// byte, with scale and zero per group of steps. Strides are in elements; a column's groups are
// adjacent.
struct QuantizedProduct {
  Product product;
  const void* scale;
  int64_t scale_column_stride;
  const void* zero;
  int64_t zero_column_stride, group_size;
};

template <>
struct Layout<QuantizedProduct> {
  using Struct = QuantizedProduct;
  static constexpr const char* name = "QuantizedProduct";
  static constexpr Field fields[] =
      FOO_FIELDS(product, scale, scale_column_stride, zero, zero_column_stride, group_size);
};
static_assert(is_whole<QuantizedProduct>());

inline const Product& matrices_of(const QuantizedProduct& product) {
  return product.product;
}

using QuantizedFunction = void(const QuantizedProduct* product, const ProductBlock* block,
                               void* scratch, int64_t* bytes);

// Weights of 8 bits if there are no zeros, or else of 4 bits: of one matrix, or of one for each
// group of rows. The steps of a column are adjacent, and so are its groups.
struct QuantizedWeights {
  at::Tensor weight, scale;
  std::optional<at::Tensor> zero;
  int64_t group_size;
};

// Copies tensors in which steps or groups of a column are not adjacent.
QuantizedWeights make_quantized_weights(const at::Tensor& weight, const at::Tensor& scale,
                                        const std::optional<at::Tensor>& zero, int64_t group_size);

// Returns the call that multiplies by weights of integers, those of one group if they are of
// several; cut into at least `least` blocks.
ProductCall<QuantizedProduct> quantized_call(const Product& product,
                                             const QuantizedWeights& weights, int64_t group,
                                             at::ScalarType dtype, int64_t least);

// Checks of the operators' arguments. They raise, and read only metadata.
void check_linear_int8(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const std::optional<at::Tensor>& bias);
void check_linear_int4(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale,
                       const at::Tensor& zero, const std::optional<at::Tensor>& bias,
                       int64_t group_size);

}  // namespace foo
