#include "ops/linear/product.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "launch/jobs.h"
#include "launch/kernel_table.h"

namespace foo {

namespace {

// The largest block: with a section of the depth, its rows of the left matrix, a panel of columns
// and the sums fit the second cache. Both are whole register tiles on all processors.
constexpr int64_t kMostRows = 256, kRowTile = 32;
constexpr int64_t kMostColumns = 256, kColumnTile = 64;
// Few rows are multiplied by all columns as they lie in memory, and so many of them by one thread
// that it reads long stretches.
constexpr int64_t kFewRows = 8, kMostColumnsOfFewRows = 1024;
// So many blocks for each thread that none waits long for the last one.
constexpr int64_t kBlocksOfThread = 4;

Kernel& product_kernel() {
  static auto* kernel = new Kernel("linear_product");
  return *kernel;
}

Kernel& few_rows_kernel() {
  static auto* kernel = new Kernel("linear_few_rows");
  return *kernel;
}

// Pairs of bfloat16 are read where the rows of the right matrix are whole pairs apart.
bool has_few_rows(const Product& product, at::ScalarType dtype) {
  const bool has_pairs = dtype != at::kBFloat16 || product.right_column_stride % 2 == 0;
  return product.rows <= kFewRows && product.right_step_stride == 1 && has_pairs;
}

// The same product with rows and columns exchanged.
Product transposed(const Product& product) {
  Product result = product;
  std::swap(result.rows, result.columns);
  std::swap(result.left, result.right);
  std::swap(result.left_row_stride, result.right_column_stride);
  std::swap(result.left_step_stride, result.right_step_stride);
  std::swap(result.bias_row_stride, result.bias_column_stride);
  std::swap(result.output_row_stride, result.output_column_stride);
  return result;
}

// Whether the rows are a stride apart, across all leading dimensions.
bool has_row_stride(const at::Tensor& tensor) {
  int64_t expected = -1;
  for (int64_t i = tensor.dim() - 2; i >= 0; --i) {
    if (tensor.size(i) == 1) continue;
    if (expected >= 0 && tensor.stride(i) != expected) return false;
    expected = tensor.stride(i) * tensor.size(i);
  }
  return true;
}

int64_t row_stride_of(const at::Tensor& tensor) {
  for (int64_t i = tensor.dim() - 2; i >= 0; --i) {
    if (tensor.size(i) != 1) return tensor.stride(i);
  }
  return 1;
}

bool is_adjacent(const at::Tensor& tensor) {
  return has_row_stride(tensor) &&
         (tensor.size(-1) <= 1 || tensor.stride(-1) == 1 || row_stride_of(tensor) == 1);
}

int64_t count_of(int64_t size, int64_t part) {
  return (size + part - 1) / part;
}

// Parts of nearly the same size, each a multiple of ``multiple``.
int64_t part_of(int64_t size, int64_t most, int64_t multiple) {
  const int64_t part = count_of(size, count_of(size, most));
  return count_of(part, multiple) * multiple;
}

struct Cut {
  int64_t rows, columns;

  Cut(const Product& product, int64_t most_columns)
      : rows(part_of(product.rows, kMostRows, kRowTile)),
        columns(part_of(product.columns, most_columns, kColumnTile)) {
    const int64_t threads = at::get_num_threads();
    while (threads > 1 && columns > kColumnTile && blocks(product) < kBlocksOfThread * threads) {
      columns -= kColumnTile;
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

}  // namespace

Matrix::Matrix(const at::Tensor& tensor)
    : tensor_(is_adjacent(tensor) ? tensor : tensor.contiguous()),
      rows_(c10::multiply_integers(tensor_.sizes().slice(0, tensor_.dim() - 1))),
      width_(tensor_.size(-1)),
      row_stride_(row_stride_of(tensor_)),
      step_stride_(width_ <= 1 ? 1 : tensor_.stride(-1)) {}

Matrix::Matrix(const at::Tensor& element, int64_t width)
    : tensor_(element), rows_(1), width_(width), row_stride_(1), step_stride_(0) {}

Matrix Matrix::transposed() const {
  Matrix result = *this;
  std::swap(result.rows_, result.width_);
  std::swap(result.row_stride_, result.step_stride_);
  return result;
}

void multiply(const at::Tensor& output, const Matrix& left, const Matrix& right,
              const std::optional<at::Tensor>& bias) {
  if (output.numel() == 0) return;
  const auto dtype = output.scalar_type();
  Product product{.rows = left.rows(),
                  .columns = right.rows(),
                  .depth = left.width(),
                  .has_bias = bias.has_value(),
                  .left = left.data(),
                  .left_row_stride = left.row_stride(),
                  .left_step_stride = left.step_stride(),
                  .right = right.data(),
                  .right_column_stride = right.row_stride(),
                  .right_step_stride = right.step_stride(),
                  .bias = nullptr,
                  .bias_row_stride = 0,
                  .bias_column_stride = 0,
                  .output = output.mutable_data_ptr(),
                  .output_row_stride = right.rows(),
                  .output_column_stride = 1};
  if (bias.has_value()) {
    product.bias = bias->const_data_ptr();
    product.bias_column_stride = bias->stride(0);
  }
  if (!has_few_rows(product, dtype) && has_few_rows(transposed(product), dtype)) {
    product = transposed(product);
  }
  const bool is_few = has_few_rows(product, dtype);
  Kernel& kernel_of_size = is_few ? few_rows_kernel() : product_kernel();
  auto* const kernel = kernel_of_size.get<ProductFunction>(dtype);
  const Cut cut(product, is_few ? kMostColumnsOfFewRows : kMostColumns);
  run_jobs(product, kernel, cut.blocks(product), cut.block(product, 0),
           [&](int64_t job, int64_t, const auto& call) { call(cut.block(product, job)); });
}

}  // namespace foo
