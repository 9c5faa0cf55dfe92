// Matrix products of any size, cut into blocks of the output. tests/project/test_agreement.py
// compares the structs with foo_ops/kernels/linear.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "launch/batch.h"
#include "launch/jobs.h"
#include "launch/kernel_table.h"

namespace foo {

// output[row, column] = bias[column] + sum over step of left[row, step] * right[column, step], or,
// if the output is transposed, output[column, row] = bias[row] + the same sum. Strides are in
// elements. In left and in right, either the steps are adjacent, or the rows or columns.
struct Product {
  int64_t rows, columns, depth, is_transposed;
  const void* left;
  int64_t left_row_stride, left_step_stride;
  const void* right;
  int64_t right_column_stride, right_step_stride;
  // Up weights of a gated product, with the same strides as the first weights: as the right matrix,
  // or as the left one of a transposed output.
  const void* second;
  int64_t has_bias;
  const void* bias;
  int64_t bias_stride;
  void* output;
  // Stride between rows, whose elements are adjacent.
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

// Returns the multiplications of a product.
inline double work_of(const Product& product) {
  return static_cast<double>(product.rows) * static_cast<double>(product.columns) *
         static_cast<double>(product.depth);
}

// The part of the output that one thread computes.
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

// Returns the number of elements of a block.
inline double area_of(const ProductBlock& block) {
  return static_cast<double>(block.row_stop - block.row_start) *
         static_cast<double>(block.column_stop - block.column_start);
}

// If ``bytes`` is given, the kernel only writes there how much scratch memory a block needs.
using ProductFunction = void(const Product* product, const ProductBlock* block, void* scratch,
                             int64_t* bytes);

// A tensor of any number of dimensions as a matrix of its rows. Keeps the tensor alive. Either the
// elements of a row are adjacent in memory, or the rows are; other tensors are copied.
class Matrix {
 public:
  explicit Matrix(const at::Tensor& tensor);
  // One row that repeats an element.
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
  const at::Tensor& tensor() const { return tensor_; }
  const void* data() const { return tensor_.const_data_ptr(); }

 private:
  at::Tensor tensor_;
  int64_t rows_, width_, row_stride_, step_stride_;
};

// Describes left right^T + bias for kernels. The output is contiguous, and bias has one row.
Product make_product(const at::Tensor& output, const Matrix& left, const Matrix& right,
                     const std::optional<at::Tensor>& bias);

// Returns a new tensor with the leading dimensions of `like`.
at::Tensor make_rows(const at::Tensor& like, int64_t width);

// Epilogue that is applied to the sums before rounding: foo_ops/kernels/linear/product.py.
enum class Finish { kNothing, kRelu, kSilu, kGelu, kGeluTanh, kSiluMul };

// Writes left right^T + bias to a contiguous output and applies the epilogue `finish`. All tensors
// are of one dtype, and bias has one row. For a gate, kSiluMul, ``second`` has the shape and the
// strides of the right matrix.
void multiply(const at::Tensor& output, const Matrix& left, const Matrix& right,
              const std::optional<at::Tensor>& bias = std::nullopt,
              Finish finish = Finish::kNothing, const Matrix* second = nullptr);

// Computes independent products of one dtype, without epilogues, in one parallel loop.
void multiply_all(const std::vector<Product>& products, at::ScalarType dtype);

// Adds left right^T to contiguous sums in the compute type.
void add_product(const at::Tensor& sums, const Matrix& left, const Matrix& right);

// Blocks are whole register tiles on all processors.
constexpr int64_t kTile = 64;
// Up to kFewRows rows are multiplied by the columns without packing. A thread takes this many
// columns at most, so that it reads long stretches.
constexpr int64_t kFewRows = 8, kMostColumnsOfFewRows = 1024;
// Up to this many steps are summed up in registers, if the result is rounded.
constexpr int64_t kMostFewSteps = 1024, kMostColumnsOfFewSteps = 512;
// Blocks per thread, so that no thread waits long for the last block.
constexpr int64_t kBlocksOfThread = 4;

inline int64_t count_of(int64_t size, int64_t part) {
  return (size + part - 1) / part;
}

// Returns the size of nearly equal parts of at most `most`, rounded up to a multiple of
// ``multiple``.
inline int64_t part_of(int64_t size, int64_t most, int64_t multiple) {
  const int64_t part = count_of(size, count_of(size, most));
  return count_of(part, multiple) * multiple;
}

// Returns how many blocks the work of a call is cut into, at least.
inline int64_t least_blocks() {
  const int64_t threads = at::get_num_threads();
  return threads > 1 ? kBlocksOfThread * threads : 1;
}

struct Cut {
  int64_t rows, columns;

  Cut(int64_t rows, int64_t columns) : rows(rows), columns(columns) {}
  Cut(const Product& product, int64_t most_rows, int64_t most_columns, int64_t least)
      : rows(part_of(product.rows, most_rows, kTile / 2)),
        columns(part_of(product.columns, most_columns, kTile)) {
    while (std::max(rows, columns) > kTile && blocks(product) < least) {
      int64_t& larger = rows > columns ? rows : columns;
      larger = part_of(larger, larger - 1, kTile);
    }
  }

  int64_t blocks(const Product& product) const {
    return count_of(product.rows, rows) * count_of(product.columns, columns);
  }

  // Consecutive blocks share columns.
  ProductBlock block(const Product& product, int64_t index) const {
    const int64_t bands = count_of(product.rows, rows);
    const int64_t row = index % bands * rows, column = index / bands * columns;
    return {row, std::min(row + rows, product.rows), column,
            std::min(column + columns, product.columns)};
  }
};

inline Cut cut_of_few_rows(const Product& product, int64_t least = least_blocks()) {
  return Cut(product, kFewRows, kMostColumnsOfFewRows, least);
}

inline int64_t second_cache_bytes() {
  static const int64_t known = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return known > 0 ? known : 1 << 20;
}

// Most rows of a block; panels of the right matrix are packed once per block. With 512 instead of
// 256, a Zen 5 takes 0.96 to 0.99 of the time in float32 and bfloat16.
inline int64_t most_rows_of_block() {
  return second_cache_bytes() >= 1 << 20 ? 512 : 256;
}

// One half of the second-level cache holds the sums of a block, for each of its `parts` products.
// The other half holds the block's rows of a section of the left matrix, and panels of the right
// one.
inline Cut cut_of_blocks(const Product& product, at::ScalarType dtype, int64_t parts,
                         int64_t least = least_blocks()) {
  const int64_t sum_bytes = parts * (dtype == at::kDouble ? 8 : 4);
  const int64_t sums = second_cache_bytes() / 2 / sum_bytes;
  const int64_t rows = most_rows_of_block();
  return Cut(product, rows, std::max(2 * kTile, sums / rows / kTile * kTile), least);
}

// Half of the second-level cache holds the block's rows of the left matrix.
inline Cut cut_of_few_steps(const Product& product, int64_t least) {
  const int64_t rows = second_cache_bytes() / 4 / std::max<int64_t>(1, product.depth);
  return Cut(product, std::max(2 * kTile, rows / kTile * kTile), kMostColumnsOfFewSteps, least);
}

inline const Product& matrices_of(const Product& product) {
  return product;
}

// A product, with its kernel and its blocks: a call of run_together.
template <class AnyProduct>
struct ProductCall {
  AnyProduct product;
  void (*kernel)(const AnyProduct* product, const ProductBlock* block, void* scratch,
                 int64_t* bytes);
  Cut cut;

  int64_t jobs() const { return cut.blocks(matrices()); }

  int64_t bytes() const {
    const ProductBlock largest = block(0);
    int64_t bytes = 0;
    kernel(&product, &largest, nullptr, &bytes);
    return bytes;
  }

  void work(int64_t job, void* scratch) const {
    const ProductBlock own = block(job);
    kernel(&product, &own, scratch, nullptr);
  }

  double cost(int64_t job) const {
    return area_of(block(job)) * static_cast<double>(matrices().depth);
  }

 private:
  const Product& matrices() const { return matrices_of(product); }
  ProductBlock block(int64_t job) const { return cut.block(matrices(), job); }
};

// Runs a product, or leaves it to this thread's batch. `read` are the tensors that it reads; any
// may be missing.
template <class AnyProduct, class... Tensors>
void run_or_wait(const ProductCall<AnyProduct>& call, const at::Tensor& output,
                 const Tensors&... read) {
  LoopBatch* const batch = LoopBatch::on(output.device());
  if (batch == nullptr) return run_together<ProductCall<AnyProduct>>({call});
  const auto tensor = [](const std::optional<at::Tensor>& it) { return it.value_or(at::Tensor()); };
  batch->add(ParallelLoop(std::make_shared<const ProductCall<AnyProduct>>(call),
                          {output, tensor(read)...}));
}

}  // namespace foo
