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
// Where there is AVX2 alone, MKL takes 0.8 to 1.0 of our time for 256 rows and more of float32 and
// float64, but what it returns for some sizes depends on the number of threads; ours never does.
constexpr std::array<Rule, 6> kRules = {{
    {Form::kForward, false, 9, 31, 1 << 23},
    {Form::kForward, false, 128, kAny},
    {Form::kForward, true, 9, 31, 1 << 23},
    {Form::kForward, true, 256, kAny},
    {Form::kGradInput, false, 9, kAny},
    {Form::kGradWeight, false, 9, kAny},
}};

bool is_set(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0';
}

// Who asks for the kernels of another processor is to get them.
bool has_processor() {
#if defined(__x86_64__)
  static const bool has = [] {
    const char* const switched = std::getenv("FOO_TORCH_PRODUCTS");
    const std::string_view chosen = switched == nullptr ? "" : switched;
    const bool asks_for_others = is_set("FOO_VECTOR_BITS") || is_set("FOO_BFLOAT16_PAIRS") ||
                                 is_set("FOO_MATRIX_UNIT") || is_set("NUMBA_CPU_NAME") ||
                                 is_set("NUMBA_CPU_FEATURES");
    return chosen != "0" && !asks_for_others && __builtin_cpu_is("amd") &&
           __builtin_cpu_supports("avx512bf16");
  }();
  return has;
#else
  return false;
#endif
}

Form form_of(const Product& product) {
  if (product.left_step_stride != 1) return Form::kGradWeight;
  return product.right_step_stride == 1 ? Form::kForward : Form::kGradInput;
}

}  // namespace

bool is_quicker_by_torch(const Product& product, at::ScalarType dtype) {
  if (dtype != at::kBFloat16 || !has_processor() || !at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  const double work = static_cast<double>(product.rows) * static_cast<double>(product.columns) *
                      static_cast<double>(product.depth);
  const Form form = form_of(product);
  const bool has_bias = product.has_bias != 0;
  const int64_t rows = form == Form::kGradWeight ? product.depth : product.rows;
  return std::any_of(kRules.begin(), kRules.end(), [&](const Rule& rule) {
    return rule.form == form && rule.has_bias == has_bias && rule.least_rows <= rows &&
           rows <= rule.most_rows && rule.least_work <= work;
  });
}

void multiply_by_torch(const at::Tensor& output, const Product& product) {
  RECORD_FUNCTION("foo::linear by aten::mm", c10::ArrayRef<const c10::IValue>{});
  // The memory of foo is host memory.
  const auto options = output.options().device(at::kCPU);
  const auto view = [&](const void* data, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    return at::from_blob(const_cast<void*>(data), sizes, strides, options);
  };
  at::Tensor target =
      view(product.output, {product.rows, product.columns}, {product.output_stride, 1});
  const at::Tensor left = view(product.left, {product.rows, product.depth},
                               {product.left_row_stride, product.left_step_stride});
  const at::Tensor right = view(product.right, {product.depth, product.columns},
                                {product.right_step_stride, product.right_column_stride});
  if (product.has_bias) {
    const at::Tensor bias = view(product.bias, {product.columns}, {product.bias_stride});
    at::cpu::addmm_out(target, bias, left, right);
  } else {
    at::cpu::mm_out(target, left, right);
  }
}

}  // namespace foo
