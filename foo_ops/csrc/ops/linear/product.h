// Matrix products of any size, cut into blocks of the output.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "launch/layout.h"

namespace foo {

// Matrix products of any size. tests/project/test_agreement.py compares the structs with
// foo_ops/kernels/linear.

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

// How launchers of products cut the output into blocks.

// Blocks are whole register tiles on all processors.
constexpr int64_t kTile = 64;
// Few rows are multiplied by all columns as they lie in memory, and so many of them by one thread
// that it reads long stretches.
constexpr int64_t kFewRows = 8, kMostColumnsOfFewRows = 1024;
// So many blocks for each thread that none waits long for the last one.
constexpr int64_t kBlocksOfThread = 4;

inline int64_t count_of(int64_t size, int64_t part) {
  return (size + part - 1) / part;
}

// Parts of nearly the same size, each a multiple of ``multiple``.
inline int64_t part_of(int64_t size, int64_t most, int64_t multiple) {
  const int64_t part = count_of(size, count_of(size, most));
  return count_of(part, multiple) * multiple;
}

struct Cut {
  int64_t rows, columns;

  Cut(const Product& product, int64_t most_rows, int64_t most_columns,
      int64_t threads = at::get_num_threads())
      : rows(part_of(product.rows, most_rows, kTile / 2)),
        columns(part_of(product.columns, most_columns, kTile)) {
    while (threads > 1 && std::max(rows, columns) > kTile &&
           blocks(product) < kBlocksOfThread * threads) {
      int64_t& larger = rows > columns ? rows : columns;
      larger = part_of(larger, larger - 1, kTile);
    }
  }

  int64_t blocks(const Product& product) const {
    return count_of(product.rows, rows) * count_of(product.columns, columns);
  }

  // Blocks that follow one another have their columns in common.
  ProductBlock block(const Product& product, int64_t index) const {
    const int64_t bands = count_of(product.rows, rows);
    const int64_t row = index % bands * rows, column = index / bands * columns;
    return {row, std::min(row + rows, product.rows), column,
            std::min(column + columns, product.columns)};
  }
};

inline Cut cut_of_few_rows(const Product& product) {
  return Cut(product, kFewRows, kMostColumnsOfFewRows);
}

inline int64_t second_cache_bytes() {
  static const int64_t known = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return known > 0 ? known : 1 << 20;
}

// Of a band of a block, for each of which panels of the right matrix are packed. With 512 in place
// of 256, a Zen 5 takes 0.96 to 0.99 of the time in float32 and bfloat16.
inline int64_t most_rows_of_block() {
  return second_cache_bytes() >= 1 << 20 ? 512 : 256;
}

// The second cache holds the sums of a block, of as many products as it has parts, in one half. In
// the other are its rows of a section of the left matrix, and panels of the right one.
inline Cut cut_of_blocks(const Product& product, at::ScalarType dtype, int64_t parts) {
  const int64_t sum_bytes = parts * (dtype == at::kDouble ? 8 : 4);
  const int64_t sums = second_cache_bytes() / 2 / sum_bytes;
  const int64_t rows = most_rows_of_block();
  return Cut(product, rows, std::max(2 * kTile, sums / rows / kTile * kTile));
}

}  // namespace foo
