// Matrix products of any size. tests/project/test_agreement.py compares the structs with
// foo_ops/kernels/linear.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "launch/layout.h"

namespace foo {

// output[row, column] = bias[column] + sum over step of left[row, step] * right[column, step], or,
// if the output is transposed, output[column, row] = bias[row] + the same sum. Strides are in
// elements. Of left and right either the steps are adjacent, or the others are.
struct Product {
  int64_t rows, columns, depth, is_transposed;
  const void* left;
  int64_t left_row_stride, left_step_stride;
  const void* right;
  int64_t right_column_stride, right_step_stride;
  // Other weights of a gate, which lie in memory as the first do: as the right matrix, or as the
  // left one of a transposed output.
  const void* second;
  int64_t has_bias;
  const void* bias;
  int64_t bias_stride;
  void* output;
  // From one row of adjacent elements to the next.
  int64_t output_stride;
};

template <>
struct Layout<Product> {
  using Struct = Product;
  static constexpr const char* name = "Product";
  static constexpr Field fields[] =
      FOO_FIELDS(rows, columns, depth, is_transposed, left, left_row_stride, left_step_stride,
                 right, right_column_stride, right_step_stride, second, has_bias, bias, bias_stride,
                 output, output_stride);
};
static_assert(is_whole<Product>());

// What one thread computes of the output.
struct ProductBlock {
  int64_t row_start, row_stop, column_start, column_stop;
};

template <>
struct Layout<ProductBlock> {
  using Struct = ProductBlock;
  static constexpr const char* name = "ProductBlock";
  static constexpr Field fields[] = FOO_FIELDS(row_start, row_stop, column_start, column_stop);
};
static_assert(is_whole<ProductBlock>());

// Where ``bytes`` is given, the kernel only writes there how much scratch memory a block needs.
using ProductFunction = void(const Product* product, const ProductBlock* block, void* scratch,
                             int64_t* bytes);

// The rows of a tensor of any number of dimensions, which it keeps alive. Either the elements of a
// row are adjacent in memory, or the rows are: a tensor where neither holds is copied.
class Matrix {
 public:
  explicit Matrix(const at::Tensor& tensor);
  // One row, of an element that is repeated.
  Matrix(const at::Tensor& element, int64_t width);

  Matrix transposed() const;
  bool lies_as(const Matrix& other) const {
    return row_stride_ == other.row_stride_ && step_stride_ == other.step_stride_;
  }

  int64_t rows() const { return rows_; }
  int64_t width() const { return width_; }
  int64_t row_stride() const { return row_stride_; }
  int64_t step_stride() const { return step_stride_; }
  at::ScalarType dtype() const { return tensor_.scalar_type(); }
  const void* data() const { return tensor_.const_data_ptr(); }

 private:
  at::Tensor tensor_;
  int64_t rows_, width_, row_stride_, step_stride_;
};

// What kernels are told of left right^T + bias. The output is contiguous, and bias has a row.
Product make_product(const at::Tensor& output, const Matrix& left, const Matrix& right,
                     const std::optional<at::Tensor>& bias);

// A new tensor with the leading dimensions of another.
at::Tensor make_rows(const at::Tensor& like, int64_t width);

// What becomes of the sums before they are rounded: foo_ops/kernels/linear/product.py.
enum class Finish { kNothing, kRelu, kSilu, kGelu, kGeluTanh, kSiluMul };

// Writes left right^T + bias to a contiguous output, finished. All are of one dtype, and bias has a
// row. Of a gate, kSiluMul, ``second`` has the shape and the strides of the right matrix.
void multiply(const at::Tensor& output, const Matrix& left, const Matrix& right,
              const std::optional<at::Tensor>& bias = std::nullopt,
              Finish finish = Finish::kNothing, const void* second = nullptr);

// Adds left right^T to contiguous sums in the compute type.
void add_product(const at::Tensor& sums, const Matrix& left, const Matrix& right);

}  // namespace foo
