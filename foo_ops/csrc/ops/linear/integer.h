// Products of integers: rows are rounded to 8 bits and multiplied by weights of 8 or 4 bits.
// tests/project/test_agreement.py compares the structs with foo_ops/kernels/linear.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "launch/kernel_table.h"
#include "ops/linear/product.h"
#include "ops/linear/quantized.h"

namespace foo {

// Rows that are rounded to integers. Sections of the steps follow each other; in each, the integers
// of a row are adjacent, as bytes with 128 added, and rows are `section` bytes apart. Scales and
// scaled sums of a cut, the steps whose products are added up as integers, are those of all `rows`.
// With a group size, that many steps share a scale and are a cut: a group, or a section. Otherwise
// the steps of a row do, and a section is a cut.
struct IntegerRows {
  int64_t rows, depth;
  const void* source;
  int64_t row_stride, group_size, section, padded_rows;
  void* integers;
  float* scales;
  float* sums;
};

template <>
struct Layout<IntegerRows> {
  using Struct = IntegerRows;
  static constexpr const char* name = "IntegerRows";
  static constexpr Field fields[] = FOO_FIELDS(rows, depth, source, row_stride, group_size, section,
                                               padded_rows, integers, scales, sums);
};
static_assert(is_whole<IntegerRows>());

// A product whose left matrix are the integers of IntegerRows; the row stride is the section. If
// weights have groups, but a cut is a section, they are rounded to 8 bits with a scale for a
// column's section.
struct IntegerProduct {
  QuantizedProduct quantized;
  int64_t cut_size, padded_rows;
  const float* row_scales;
  const float* row_sums;
};

template <>
struct Layout<IntegerProduct> {
  using Struct = IntegerProduct;
  static constexpr const char* name = "IntegerProduct";
  static constexpr Field fields[] =
      FOO_FIELDS(quantized, cut_size, padded_rows, row_scales, row_sums);
};
static_assert(is_whole<IntegerProduct>());

inline const Product& matrices_of(const IntegerProduct& product) {
  return product.quantized.product;
}

using IntegerRowsFunction = void(const IntegerRows* rows, const ProductBlock* block, void* scratch,
                                 int64_t* bytes);
using IntegerFunction = void(const IntegerProduct* product, const ProductBlock* block,
                             void* scratch, int64_t* bytes);

// Checks the options and the dtype that they need; it reads only metadata.
void check_activations(const char* name, const at::Tensor& input, const at::Tensor& scale,
                       std::optional<int64_t> activations, bool by_section);

// Whether there are so many rows that the product packs the weights.
bool are_integers_packed(const at::Tensor& input, const QuantizedWeights& weights, bool by_section);

// Returns the product of rows that are rounded to integers, and integers of 8 or 4 bits. With
// `by_section`, sections of both have a scale, in place of groups.
at::Tensor multiply_integers(const at::Tensor& input, const QuantizedWeights& weights,
                             const std::optional<at::Tensor>& bias, bool by_section);

// The same, packed. With `is_gated` it returns the silu of the products with the first half of the
// weight's rows, times those with the second half.
at::Tensor multiply_packed_integers(const at::Tensor& input, const QuantizedWeights& weights,
                                    const std::optional<at::Tensor>& bias, bool by_section,
                                    bool is_gated = false);

}  // namespace foo
