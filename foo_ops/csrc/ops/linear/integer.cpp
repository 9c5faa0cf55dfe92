#include "ops/linear/integer.h"

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <string>

#include "launch/jobs.h"
#include "launch/memory.h"
#include "launch/symbols.h"

namespace foo {

namespace {

// Steps of a section: so few that each sum of products of two bytes is exact in float32.
constexpr int64_t kSection = 512;
// Most steps whose products are added up in 32 bits.
constexpr int64_t kMostSteps = 1 << 17;
// Multiple of rows on a matrix unit, for which memory is allocated.
constexpr int64_t kRowMultiple = 32;
// Rows that a thread rounds at a time.
constexpr int64_t kRowsOfJob = 16;
// Most columns of a block.
constexpr int64_t kColumnsOfBlock = 2 * kTile;

// Kernels of few rows, which round the rows themselves.
Kernel& few_rows_kernel(const QuantizedWeights& weights) {
  static auto* const int8 = new Kernel("integer_few_rows.int8");
  static auto* const int8_groups = new GroupKernels("integer_few_rows.int8");
  static auto* const int4 = new GroupKernels("integer_few_rows.int4");
  if (weights.zero.has_value()) return int4->of(weights.group_size);
  return weights.has_groups() ? int8_groups->of(weights.group_size) : *int8;
}

Kernel& product_kernel(const QuantizedWeights& weights, bool is_gated) {
  static auto* const int8 = new Kernel("integer_product.int8");
  static auto* const int4 = new Kernel("integer_product.int4");
  static auto* const gated_int8 = new Kernel("integer_product.int8.silu_mul");
  static auto* const gated_int4 = new Kernel("integer_product.int4.silu_mul");
  if (weights.zero.has_value()) return is_gated ? *gated_int4 : *int4;
  return is_gated ? *gated_int8 : *int8;
}

Kernel& rows_kernel() {
  static auto* const kernel = new Kernel("integer_rows");
  return *kernel;
}

// Most rows that are multiplied by weights as they lie in memory. With 16 rows and 4096 x 4096
// weights, one thread of a Zen 4 takes 0.53 of the time without groups (0.83 with 48 rows), and
// with groups of 64 0.94 (8 bits) and 0.74 (4 bits).
int64_t most_rows_without_packing(const QuantizedWeights& weights) {
  return weights.has_groups() ? 16 : 64;
}

void round_rows(const IntegerRows& rows, at::ScalarType dtype) {
  auto* const kernel = rows_kernel().get<IntegerRowsFunction>(dtype);
  const auto block_of = [&](int64_t job) {
    const int64_t start = job * kRowsOfJob;
    return ProductBlock{start, std::min(start + kRowsOfJob, rows.rows), 0, 0};
  };
  const auto cost = [&](int64_t) { return static_cast<double>(kRowsOfJob * rows.depth); };
  run_jobs(
      rows, kernel, count_of(rows.rows, kRowsOfJob), block_of(0),
      [&](int64_t job, int64_t, const auto& call) { call(block_of(job)); }, cost);
}

// Panels of weights are packed once per block, so blocks have many rows and few columns: sums and a
// section of the rows take three quarters of the second-level cache. With 768 rows of 1024 and 2816
// steps, a Zen 4 takes 0.98 to 0.99 of the time that it takes with 384 rows and 256 columns.
Cut cut_of(const Product& product, int64_t parts) {
  const int64_t bytes_of_row = kSection + parts * kColumnsOfBlock * sizeof(float);
  const int64_t rows = second_cache_bytes() * 3 / 4 / bytes_of_row;
  return Cut(product, rows, kColumnsOfBlock, least_blocks());
}

}  // namespace

void check_activations(const char* name, const at::Tensor& input, const at::Tensor& scale,
                       std::optional<int64_t> activations, bool by_section) {
  TORCH_CHECK_VALUE(!by_section || activations.has_value(), name,
                    ": by_section must be False without activations, got True");
  TORCH_CHECK_VALUE(!by_section || scale.dim() == 2, name,
                    ": by_section must be False for weights without groups, got True");
  if (!activations.has_value()) return;
  TORCH_CHECK_VALUE(*activations == 8, name, ": activations must be None or 8, got ", *activations);
  TORCH_CHECK_TYPE(input.scalar_type() != at::kDouble, name,
                   ": input must be float16, bfloat16 or float32 for activations of 8 bits, got ",
                   dtype_name(input.scalar_type()));
}

bool are_integers_packed(const at::Tensor& input, const QuantizedWeights& weights,
                         bool by_section) {
  const int64_t rows = c10::multiply_integers(input.sizes().slice(0, input.dim() - 1));
  const bool is_exact = weights.has_groups() || input.size(-1) <= kMostSteps;
  return rows > most_rows_without_packing(weights) || by_section || !is_exact;
}

at::Tensor multiply_integers(const at::Tensor& input, const QuantizedWeights& weights,
                             const std::optional<at::Tensor>& bias, bool by_section) {
  if (are_integers_packed(input, weights, by_section)) {
    return multiply_packed_integers(input, weights, bias, by_section);
  }
  const at::Tensor output = make_rows(input, weights.weight.size(0));
  if (output.numel() == 0) return output;
  const Matrix left(with_adjacent_steps(input)), right(weights.weight);
  const QuantizedProduct quantized =
      quantized_product(make_product(output, left, right, bias), weights, 0);
  auto* const kernel = few_rows_kernel(weights).get<QuantizedFunction>(output.scalar_type());
  run_or_wait(ProductCall<QuantizedProduct>{quantized, kernel, cut_of_few_rows(quantized.product)},
              output, left.tensor(), weights.weight, weights.scale, weights.zero, bias);
  return output;
}

at::Tensor multiply_packed_integers(const at::Tensor& input, const QuantizedWeights& weights,
                                    const std::optional<at::Tensor>& bias, bool by_section,
                                    bool is_gated) {
  const int64_t parts = is_gated ? 2 : 1, columns = weights.weight.size(0) / parts;
  const at::Tensor output = make_rows(input, columns);
  if (output.numel() == 0) return output;
  const auto dtype = output.scalar_type();
  const Matrix left(with_adjacent_steps(input)), right(weights.weight);
  QuantizedProduct quantized =
      quantized_product(make_product(output, left, right, bias), weights, 0);
  Product& product = quantized.product;
  product.columns = product.output_stride = columns;
  // Steps that share a scale of the rows; 0 for all of a row.
  const int64_t group_size = by_section ? kSection : weights.group_size;
  const int64_t cut_size = group_size == 0 ? kSection : group_size;
  const int64_t sections = count_of(product.depth, kSection);
  const int64_t rows = count_of(product.rows, kRowMultiple) * kRowMultiple;
  const int64_t cuts = count_of(product.depth, cut_size);
  const at::Tensor integers =
      new_tensor({sections, rows, kSection}, input.options().dtype(at::kByte));
  const at::Tensor factors = new_tensor({2, cuts, rows}, input.options().dtype(at::kFloat));
  auto* const scales = factors.mutable_data_ptr<float>();
  auto* const sums = scales + cuts * rows;
  round_rows({.rows = product.rows,
              .depth = product.depth,
              .source = product.left,
              .row_stride = product.left_row_stride,
              .group_size = group_size,
              .section = kSection,
              .padded_rows = rows,
              .integers = integers.mutable_data_ptr(),
              .scales = scales,
              .sums = sums},
             dtype);
  product.left = integers.const_data_ptr();
  product.left_row_stride = kSection;
  auto* const kernel = product_kernel(weights, is_gated).get<IntegerFunction>(dtype);
  run_together<ProductCall<IntegerProduct>>(
      {{{quantized, cut_size, rows, scales, sums}, kernel, cut_of(product, parts)}});
  return output;
}

}  // namespace foo
