#include "ops/linear/product.h"

#include <ATen/cpu/Utils.h>
#include <c10/util/accumulate.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "launch/jobs.h"
#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "ops/linear/torch_product.h"

namespace foo {

namespace {

constexpr std::array<const char*, 6> kFinishes = {"",      ".relu",      ".silu",
                                                  ".gelu", ".gelu_tanh", ".silu_mul"};

// Kernels with a common name, one for each Finish.
class Kernels {
 public:
  explicit Kernels(const std::string& name) {
    for (const char* finish : kFinishes)
      kernels_.push_back(std::make_unique<Kernel>(name + finish));
  }
  Kernel& operator[](Finish finish) { return *kernels_[static_cast<size_t>(finish)]; }

 private:
  std::vector<std::unique_ptr<Kernel>> kernels_;
};

Kernels& product_kernels() {
  static auto* kernels = new Kernels("linear_product");
  return *kernels;
}

// Whether kernels are compiled for a matrix unit: see use_matrix_unit of
// foo_ops/kernels/compiler/processor.py.
bool has_matrix_unit() {
  static const bool has = [] {
    const char* const chosen = std::getenv("FOO_MATRIX_UNIT");
    return chosen == nullptr || *chosen == '\0' ? at::cpu::init_amx() : *chosen == '1';
  }();
  return has;
}

bool is_on_matrix_unit(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && has_matrix_unit();
}

// Where there is a matrix unit, a row is multiplied on vectors: they read weights from memory in
// their order, at 13.3 to 15.4 GB/s (24.4 to 29.7 on two threads) of a Granite Rapids, registers of
// the unit at 12 to 14 (20.8 to 24.3). A small right matrix is likely to be in the caches; there
// two rows of 64 and weights of 64 x 64 take 3.2 us on vectors and 4.1 on the unit.
constexpr int64_t kRowsOfVectors = 2, kSmallMatrix = 1 << 18;

Kernels& few_rows_kernels(const Product& product, at::ScalarType dtype) {
  static auto* on_vectors = new Kernels("linear_few_rows");
  static auto* on_matrix_unit = new Kernels("linear_few_rows_on_unit");
  const bool is_small =
      product.rows <= kRowsOfVectors && product.columns * product.depth <= kSmallMatrix;
  return is_on_matrix_unit(dtype) && product.rows > 1 && !is_small ? *on_matrix_unit : *on_vectors;
}

Kernel& adjacent_columns_kernel() {
  static auto* kernel = new Kernel("linear_few_rows_of_adjacent_columns");
  return *kernel;
}

Kernel& few_steps_kernel() {
  static auto* kernel = new Kernel("linear_few_steps");
  return *kernel;
}

// Finish the sums of PyTorch's products.
Kernels& finish_kernels() {
  static auto* kernels = new Kernels("linear_finish");
  return *kernels;
}

Kernel& sums_kernel() {
  static auto* kernel = new Kernel("linear_product.sums");
  return *kernel;
}

// Most rows that are multiplied by the columns without packing these: on a matrix unit, as many as
// one of its registers has columns.
int64_t most_few_rows(at::ScalarType dtype) {
  return is_on_matrix_unit(dtype) ? 2 * kFewRows : kFewRows;
}

// Pairs of bfloat16 are read only if the distance between rows of the right matrix is whole pairs.
bool has_few_rows(const Product& product, at::ScalarType dtype, int64_t most) {
  const bool has_pairs = dtype != at::kBFloat16 || product.right_column_stride % 2 == 0;
  return product.rows <= most && product.right_step_stride == 1 && has_pairs;
}

bool has_few_rows_of_adjacent_columns(const Product& product) {
  return product.rows <= kFewRows && product.right_column_stride == 1 && !product.is_transposed;
}

// Whether the sums need not leave the registers before they are rounded. In float32 and float64
// those of few steps are added up in the output anyway.
bool has_few_steps(const Product& product, at::ScalarType dtype) {
  const bool is_narrow = dtype == at::kHalf || (dtype == at::kBFloat16 && !has_matrix_unit());
  const bool are_adjacent = product.left_row_stride == 1 && product.right_column_stride == 1;
  return is_narrow && are_adjacent && !product.has_bias && !product.is_transposed &&
         0 < product.depth && product.depth <= kMostFewSteps;
}

// Returns the same product with rows and columns exchanged.
Product transposed(const Product& product) {
  Product result = product;
  std::swap(result.rows, result.columns);
  std::swap(result.left, result.right);
  std::swap(result.left_row_stride, result.right_column_stride);
  std::swap(result.left_step_stride, result.right_step_stride);
  result.is_transposed = !product.is_transposed;
  return result;
}

// Returns the elements that are copied to pack both matrices and to write the output. The steps of
// the right matrix are packed one after the other, so adjacent steps are transposed; the left
// matrix is copied in long runs or not at all, but pairs of its steps must be adjacent. Transposing
// costs twice.
double copied_elements(const Product& product, at::ScalarType dtype) {
  const double right = product.right_step_stride == 1 ? 2 : 1;
  const double left = product.left_step_stride == 1 ? 0 : dtype == at::kBFloat16 ? 2 : 0.5;
  const double rows = product.rows, columns = product.columns;
  return product.depth * (right * columns + left * rows) + product.is_transposed * rows * columns;
}

// Returns the bytes of the processor's widest vectors.
int64_t vector_bytes() {
#if defined(__x86_64__)
  static const int64_t bytes = __builtin_cpu_supports("avx512f") ? 64
                               : __builtin_cpu_supports("avx")   ? 32
                                                                 : 16;
  return bytes;
#else
  return 16;
#endif
}

// Returns the rows times columns that register tiles multiply. Columns are whole vectors, in pairs,
// of which half takes 0.6 of the time, or 0.55 with AVX-512, where 12 sums hide the latency of a
// multiplication; rows are multiplied 12 and 4 at a time, and each of the others takes 2.5 times as
// long. A matrix unit has whole tiles of both, and multiplies so fast that packing decides.
double multiplied_area(const Product& product, at::ScalarType dtype) {
  if (is_on_matrix_unit(dtype)) return 0;
  const int64_t lanes = vector_bytes() / (dtype == at::kDouble ? 8 : 4), pair = 2 * lanes;
  const int64_t rest = product.columns % pair;
  const double half = vector_bytes() == 64 && dtype != at::kBFloat16 ? 0.55 : 0.6;
  const double of_rest = rest == 0 ? 0 : rest <= lanes ? half : 1;
  const double pairs = static_cast<double>(product.columns / pair) + of_rest;
  const int64_t single_rows = product.rows % 4;
  return pairs * pair * (static_cast<double>(product.rows) + 1.5 * single_rows);
}

// Returns the time of a product in multiplications, as a Zen 4 was measured: it copies an element
// in the time of one multiplication of float32, of which bfloat16 has two.
double cost_of(const Product& product, at::ScalarType dtype) {
  const double copying = dtype == at::kBFloat16 ? 2 : 1;
  return copying * copied_elements(product, dtype) +
         static_cast<double>(product.depth) * multiplied_area(product, dtype);
}

// Whether one stride separates the rows, across all leading dimensions.
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

void run(const Product& product, at::ScalarType dtype, Kernel& kernel, const Cut& cut) {
  run_together<ProductCall<Product>>({{product, kernel.get<ProductFunction>(dtype), cut}});
}

// Returns the product or its transpose, whichever costs less. With 97 rows of bfloat16 and weights
// of 1024 x 1024, whose transpose has 7 vectors of columns, a Zen 4 takes 0.86 of the transpose's
// time.
Product cheaper(const Product& product, at::ScalarType dtype) {
  const Product other = transposed(product);
  return cost_of(other, dtype) < cost_of(product, dtype) ? other : product;
}

void run_blocks(const Product& product, at::ScalarType dtype, Kernel& kernel, int64_t parts) {
  const Product chosen = cheaper(product, dtype);
  run(chosen, dtype, kernel, cut_of_blocks(chosen, dtype, parts));
}

// Whether PyTorch's kernel is faster for one of several products, although it computes those of
// bfloat16 one after the other. For 32 matrices of 1024 x 1024 and a number of rows each, a Zen 4
// takes these parts of that kernel's time:
//
//                       one thread            two threads
//   rows             24     96    384       24     96    384
//   grad_input     1.08   0.93   0.99     1.00   0.85   0.99
//   grad_weight           0.85   0.98            0.76   0.98
bool is_quicker_one_by_one(const Product& product, at::ScalarType dtype) {
  const bool is_grad_input = product.left_step_stride == 1 && product.right_step_stride != 1;
  const bool is_quick = dtype == at::kBFloat16 && (is_grad_input || has_few_steps(product, dtype));
  return !is_quick && is_quicker_by_torch(product, dtype, Finish::kNothing);
}

// Most rows of an expert that are multiplied without packing its matrix. With 12 and 16 rows of
// bfloat16 this takes 0.8 of the time on a Zen 5, where matrices come from memory; with 32 it takes
// 1.2 times as long, and in float32 12 rows 1.2 times.
int64_t most_rows_without_packing(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 2 * kFewRows : kFewRows;
}

// Returns how to compute a product that is cut into at least `least` blocks.
ProductCall<Product> call_of(const Product& product, at::ScalarType dtype, int64_t least) {
  const int64_t most = most_rows_without_packing(dtype);
  for (const Product& either : {product, transposed(product)}) {
    if (has_few_rows(either, dtype, most)) {
      auto* const kernel =
          few_rows_kernels(either, dtype)[Finish::kNothing].get<ProductFunction>(dtype);
      return {either, kernel, cut_of_few_rows(either, least)};
    }
  }
  if (has_few_rows_of_adjacent_columns(product)) {
    auto* const kernel = adjacent_columns_kernel().get<ProductFunction>(dtype);
    return {product, kernel, cut_of_few_rows(product, least)};
  }
  if (has_few_steps(product, dtype)) {
    auto* const kernel = few_steps_kernel().get<ProductFunction>(dtype);
    return {product, kernel, cut_of_few_steps(product, least)};
  }
  const Product chosen = cheaper(product, dtype);
  auto* const kernel = product_kernels()[Finish::kNothing].get<ProductFunction>(dtype);
  return {chosen, kernel, cut_of_blocks(chosen, dtype, 1, least)};
}

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

at::Tensor make_rows(const at::Tensor& like, int64_t width) {
  c10::SmallVector<int64_t, 6> sizes(like.sizes().begin(), like.sizes().end());
  sizes.back() = width;
  return new_tensor(sizes, like.options());
}

Product make_product(const at::Tensor& output, const Matrix& left, const Matrix& right,
                     const std::optional<at::Tensor>& bias) {
  return {.rows = left.rows(),
          .columns = right.rows(),
          .depth = left.width(),
          .is_transposed = false,
          .left = left.data(),
          .left_row_stride = left.row_stride(),
          .left_step_stride = left.step_stride(),
          .right = right.data(),
          .right_column_stride = right.row_stride(),
          .right_step_stride = right.step_stride(),
          .second = nullptr,
          .has_bias = bias.has_value(),
          .bias = bias.has_value() ? bias->const_data_ptr() : nullptr,
          .bias_stride = bias.has_value() ? bias->stride(0) : 0,
          .output = output.mutable_data_ptr(),
          .output_stride = right.rows()};
}

void multiply(const at::Tensor& output, const Matrix& left, const Matrix& right,
              const std::optional<at::Tensor>& bias, Finish finish, const Matrix* second) {
  if (output.numel() == 0) return;
  const auto dtype = output.scalar_type();
  Product product = make_product(output, left, right, bias);
  if (second != nullptr) product.second = second->data();
  const auto multiply_few_rows = [&](const Product& few) {
    auto* const kernel = few_rows_kernels(few, dtype)[finish].get<ProductFunction>(dtype);
    const ProductCall<Product> call{few, kernel, cut_of_few_rows(few)};
    const at::Tensor other = second == nullptr ? at::Tensor() : second->tensor();
    run_or_wait(call, output, left.tensor(), right.tensor(), other, bias);
  };
  const int64_t most = most_few_rows(dtype);
  if (has_few_rows(product, dtype, most)) {
    multiply_few_rows(product);
  } else if (second == nullptr && has_few_rows(transposed(product), dtype, most)) {
    multiply_few_rows(transposed(product));
  } else if (is_quicker_by_torch(product, dtype, finish)) {
    const bool is_finished = finish != Finish::kNothing || product.has_bias;
    multiply_by_torch(output, product, is_finished ? &finish_kernels()[finish] : nullptr);
  } else if (finish == Finish::kNothing && has_few_steps(product, dtype)) {
    run(product, dtype, few_steps_kernel(), cut_of_few_steps(product, least_blocks()));
  } else {
    run_blocks(product, dtype, product_kernels()[finish], second == nullptr ? 1 : 2);
  }
}

void multiply_all(const std::vector<Product>& products, at::ScalarType dtype) {
  double work = 0;
  for (const Product& product : products) work += work_of(product);
  std::vector<ProductCall<Product>> calls;
  std::vector<Product> by_torch;
  for (const Product& product : products) {
    if (product.rows == 0 || product.columns == 0) continue;
    const double share = work > 0 ? work_of(product) / work : 1.0;
    const auto least = static_cast<int64_t>(std::ceil(share * least_blocks()));
    const bool is_few = product.rows <= most_rows_without_packing(dtype);
    if (!is_few && is_quicker_one_by_one(product, dtype)) {
      by_torch.push_back(product);
    } else {
      calls.push_back(call_of(product, dtype, least));
    }
  }
  if (!calls.empty()) run_together(calls);
  if (!by_torch.empty()) multiply_all_by_torch(by_torch, dtype);
}

void add_product(const at::Tensor& sums, const Matrix& left, const Matrix& right) {
  if (sums.numel() == 0) return;
  const Product product = make_product(sums, left, right, std::nullopt);
  const auto dtype = left.dtype();
  if (dtype == sums.scalar_type() && is_quicker_by_torch(product, dtype, Finish::kNothing)) {
    add_by_torch(sums, product);
  } else {
    run_blocks(product, dtype, sums_kernel(), 1);
  }
}

}  // namespace foo
