#include "ops/linear/torch_product.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "launch/jobs.h"
#include "ops/linear/cut.h"

namespace foo {

namespace {

// The three products of a layer differ in how its matrices lie in memory: forward the steps of both
// are adjacent, of grad_input those of the left one, and of grad_weight none.
enum class Form { kForward, kGradInput, kGradWeight };

struct Rule {
  Form form;
  bool has_bias;
  // Of the layer's input, over which grad_weight sums.
  int64_t least_rows, most_rows;
  // Of multiplications. Of fewer, what PyTorch does around a product takes too long.
  double least_work = 1 << 22;
};

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// bfloat16 on AMD's processors with AVX512-BF16, where oneDNN reaches 0.85 to 0.95 of their peak.
// The speed of ours beside it on a Zen 5, one thread, layers of 512 x 512, 2816 x 1024 and
// 1024 x 2816:
//
//   rows               16            32            64           128          1024
//   forward       1.04 - 1.45   1.08 - 1.44   1.03 - 1.15   0.98 - 1.00   0.89 - 0.98
//   grad_input    0.74 - 1.00   0.84 - 0.98   0.85 - 0.99   0.94 - 0.99   0.85 - 1.01
//   grad_weight   0.34 - 0.50   0.35 - 0.68   0.52 - 0.78   0.63 - 0.83   0.92 - 0.99
//
// Forward, 9, 12 and 24 rows of 1024 x 2816 are at 0.74 to 0.89, of 512 x 512 at 1.15 to 1.26. With
// a bias:
//
//   rows               16            64           128           256          1024
//   forward       1.05 - 1.59   1.01 - 1.18   0.99 - 1.04   0.95 - 0.97   0.93 - 1.04
//
// Our float32 is 1.4 to 2.4 times as fast as PyTorch's there.
constexpr std::array<Rule, 6> kBFloat16Rules = {{
    {Form::kForward, false, 9, 31, 1 << 23},
    {Form::kForward, false, 128, kAny},
    {Form::kForward, true, 9, 31, 1 << 23},
    {Form::kForward, true, 256, kAny},
    {Form::kGradInput, false, 9, kAny},
    {Form::kGradWeight, false, 9, kAny},
}};

// float32 and float64 on AMD's processors with AVX2 alone, by MKL. The speed beside PyTorch's of
// ours and of blocks that MKL computes, on a Zen 3 with a neighbour, one thread and two, layers of
// 512 x 512, 1024 x 1024, 2816 x 1024 and 1024 x 2816:
//
//                 rows         float32: ours    in blocks     float64: ours    in blocks
//   forward       256            0.90 - 1.25   0.97 - 1.18      0.78 - 1.00   0.84 - 1.03
//   forward       1024           0.86 - 1.11   0.95 - 1.12      0.78 - 0.99   0.83 - 1.16
//   grad_input    256            0.84 - 1.13   0.94 - 1.20      0.85 - 1.00   0.84 - 0.99
//   grad_input    1024           0.82 - 1.02   0.90 - 1.20      0.73 - 1.02   0.78 - 1.18
//   grad_weight   512 - 2048     0.81 - 1.17   0.83 - 1.12      0.77 - 1.23   0.71 - 1.18
//
// Of grad_weight the means are 0.91 and 0.95, and of float64 both 0.9. Of 256 rows ours of float32
// is at 0.94 - 1.24. With a bias, blocks of float32 are at 0.93 - 1.19.
constexpr std::array<Rule, 4> kFloat32Rules = {{
    {Form::kForward, false, 256, kAny},
    {Form::kForward, true, 256, kAny},
    {Form::kGradInput, false, 256, kAny},
    {Form::kGradWeight, false, 512, kAny},
}};
constexpr std::array<Rule, 3> kFloat64Rules = {{
    {Form::kForward, false, 256, kAny},
    {Form::kForward, true, 256, kAny},
    {Form::kGradInput, false, 256, kAny},
}};
// What MKL returns for some sizes depends on the number of threads. So one thread computes a block,
// and blocks are the same for all numbers of them: so large that the whole takes 0.96 to 1.06 of
// the time for them on one thread, forward and for grad_input, and so small that many threads have
// some.
constexpr int64_t kRowsOfBlock = 256, kColumnsOfBlock = 512;

bool is_set(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0';
}

// Who asks for the kernels of another processor is to get them.
bool leaves_products() {
  static const bool leaves = [] {
    const char* const switched = std::getenv("FOO_TORCH_PRODUCTS");
    const std::string_view chosen = switched == nullptr ? "" : switched;
    const bool asks_for_others = is_set("FOO_VECTOR_BITS") || is_set("FOO_BFLOAT16_PAIRS") ||
                                 is_set("FOO_MATRIX_UNIT") || is_set("NUMBA_CPU_NAME") ||
                                 is_set("NUMBA_CPU_FEATURES");
    return chosen != "0" && !asks_for_others;
  }();
  return leaves;
}

// What is measured for the dtype on this processor.
c10::ArrayRef<Rule> rules_for(at::ScalarType dtype) {
#if defined(__x86_64__)
  if (!leaves_products() || !__builtin_cpu_is("amd")) return {};
  if (dtype == at::kBFloat16) {
    const bool is_measured =
        __builtin_cpu_supports("avx512bf16") && at::globalContext().userEnabledMkldnn();
    return is_measured ? c10::ArrayRef<Rule>(kBFloat16Rules) : c10::ArrayRef<Rule>();
  }
  if (__builtin_cpu_supports("avx2") && !__builtin_cpu_supports("avx512f") && at::hasMKL()) {
    if (dtype == at::kFloat) return kFloat32Rules;
    if (dtype == at::kDouble) return kFloat64Rules;
  }
#endif
  return {};
}

Form form_of(const Product& product) {
  if (product.left_step_stride != 1) return Form::kGradWeight;
  return product.right_step_stride == 1 ? Form::kForward : Form::kGradInput;
}

}  // namespace

bool is_quicker_by_torch(const Product& product, at::ScalarType dtype) {
  const double work = static_cast<double>(product.rows) * static_cast<double>(product.columns) *
                      static_cast<double>(product.depth);
  const Form form = form_of(product);
  const bool has_bias = product.has_bias != 0;
  const int64_t rows = form == Form::kGradWeight ? product.depth : product.rows;
  const auto rules = rules_for(dtype);
  return std::any_of(rules.begin(), rules.end(), [&](const Rule& rule) {
    return rule.form == form && rule.has_bias == has_bias && rule.least_rows <= rows &&
           rows <= rule.most_rows && rule.least_work <= work;
  });
}

namespace {

void multiply_block(const at::TensorOptions& options, const Product& product,
                    const ProductBlock& block) {
  const auto view = [&](const void* data, int64_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
    const auto* const bytes = static_cast<const char*>(data);
    const auto place = offset * static_cast<int64_t>(options.dtype().itemsize());
    return at::from_blob(const_cast<char*>(bytes + place), sizes, strides, options);
  };
  const int64_t rows = block.row_stop - block.row_start;
  const int64_t columns = block.column_stop - block.column_start;
  at::Tensor target =
      view(product.output, block.row_start * product.output_stride + block.column_start,
           {rows, columns}, {product.output_stride, 1});
  const at::Tensor left =
      view(product.left, block.row_start * product.left_row_stride, {rows, product.depth},
           {product.left_row_stride, product.left_step_stride});
  const at::Tensor right =
      view(product.right, block.column_start * product.right_column_stride,
           {product.depth, columns}, {product.right_step_stride, product.right_column_stride});
  if (product.has_bias) {
    const at::Tensor bias = view(product.bias, block.column_start * product.bias_stride, {columns},
                                 {product.bias_stride});
    at::cpu::addmm_out(target, bias, left, right);
  } else {
    at::cpu::mm_out(target, left, right);
  }
}

}  // namespace

void multiply_by_torch(const at::Tensor& output, const Product& product) {
  RECORD_FUNCTION("foo::linear by aten::mm", c10::ArrayRef<const c10::IValue>{});
  // The memory of foo is host memory.
  const auto options = output.options().device(at::kCPU);
  if (output.scalar_type() == at::kBFloat16) {
    multiply_block(options, product, {0, product.rows, 0, product.columns});
    return;
  }
  const Cut cut(product, kRowsOfBlock, kColumnsOfBlock, /*threads=*/1);
  share_jobs(cut.blocks(product), [&](int64_t, auto next) {
    for (int64_t job = next(); job >= 0; job = next()) {
      multiply_block(options, product, cut.block(product, job));
    }
  });
}

}  // namespace foo
