#include "ops/linear/torch_product.h"

#include <ATen/Context.h>
#include <ATen/cpu/Utils.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/jobs.h"
#include "ops/linear/product.h"

// MKL has this function, if PyTorch is linked with it.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int count);

namespace foo {

namespace {

template <class Member>
constexpr unsigned set_of(std::initializer_list<Member> members) {
  unsigned result = 0;
  for (const Member member : members) result |= 1U << static_cast<unsigned>(member);
  return result;
}

template <class Member>
constexpr bool is_in(unsigned set, Member member) {
  return (set >> static_cast<unsigned>(member) & 1U) != 0;
}

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

struct Rule {
  unsigned families, dtypes, forms;
  int64_t least_rows, most_rows = kAny;
  // With less work, PyTorch's overhead around a product is too large.
  double least_work = 1 << 22;
};

constexpr unsigned kAmdAvx2 = set_of({Family::kAmdAvx2});
constexpr unsigned kAmdBFloat16 = set_of({Family::kAmdBFloat16});
constexpr unsigned kIntelAvx2 = set_of({Family::kIntelAvx2});
constexpr unsigned kIntelAvx512 =
    set_of({Family::kIntelAvx512, Family::kIntelBFloat16, Family::kIntelMatrixUnit});
constexpr unsigned kIntel = kIntelAvx2 | kIntelAvx512;
constexpr unsigned kIntelMatrixUnit = set_of({Family::kIntelMatrixUnit});

constexpr unsigned kFloat32 = set_of({at::kFloat});
constexpr unsigned kFloat64 = set_of({at::kDouble});
constexpr unsigned kFloat32And64 = set_of({at::kFloat, at::kDouble});
constexpr unsigned kBFloat16 = set_of({at::kBFloat16});

constexpr unsigned kForward = set_of({Form::kForward});
constexpr unsigned kForwardAndFinished =
    set_of({Form::kForward, Form::kBias, Form::kActivation, Form::kGate});
constexpr unsigned kBias = set_of({Form::kBias});
constexpr unsigned kGradInput = set_of({Form::kGradInput});
constexpr unsigned kGradWeight = set_of({Form::kGradWeight});
constexpr unsigned kAll = set_of({Form::kForward, Form::kBias, Form::kActivation, Form::kGate,
                                  Form::kGradInput, Form::kGradWeight});

// bfloat16 on AMD processors with AVX512-BF16, where oneDNN reaches 0.85 to 0.95 of peak. Speed of
// our kernel relative to it on a Zen 5, one thread, layers of 512 x 512, 2816 x 1024 and 1024 x
// 2816:
//
//   rows               16            32            64           128          1024
//   forward       1.04 - 1.45   1.08 - 1.44   1.03 - 1.15   0.98 - 1.00   0.89 - 0.98
//   grad_input    0.74 - 1.00   0.84 - 0.98   0.85 - 0.99   0.94 - 0.99   0.85 - 1.01
//   grad_weight   0.34 - 0.50   0.35 - 0.68   0.52 - 0.78   0.63 - 0.83   0.92 - 0.99
//
// On a Zen 4, forward with 9 to 31 rows, no longer padded to whole vectors, is at 0.95 to 1.40,
// and on two threads at 0.99 to 1.75. With a bias:
//
//   rows               16            64           128           256          1024
//   forward       1.05 - 1.59   1.01 - 1.18   0.99 - 1.04   0.95 - 0.97   0.93 - 1.04
//
// Up to kMostFewSteps rows, grad_weight has had a kernel of its own since. On a Zen 4, layers of
// the same sizes:
//
//   rows                   9            16            64           256          1024
//   one thread        0.95 - 1.23   0.99 - 1.22   1.02 - 1.07   1.03 - 1.05   1.01 - 1.02
//   two threads       0.78 - 1.47   0.85 - 1.39   0.93 - 1.13   0.96 - 1.04   0.96 - 1.01
//
// Our float32 kernel is 1.4 to 2.4 times as fast as PyTorch's there.
constexpr std::array kAmdBFloat16Rules = {
    Rule{kAmdBFloat16, kBFloat16, kForward, 128},
    Rule{kAmdBFloat16, kBFloat16, kBias, 256},
    Rule{kAmdBFloat16, kBFloat16, kGradInput | kGradWeight, 9},
};

// float32 and float64 on AMD processors with AVX2 only, where PyTorch uses MKL. Speed relative to
// PyTorch's, of our kernel and of blocks that MKL computes, on a shared Zen 3, one thread and two,
// layers of 512 x 512, 1024 x 1024, 2816 x 1024 and 1024 x 2816:
//
//                 rows         float32: ours    in blocks     float64: ours    in blocks
//   forward       256            0.90 - 1.25   0.97 - 1.18      0.78 - 1.00   0.84 - 1.03
//   forward       1024           0.86 - 1.11   0.95 - 1.12      0.78 - 0.99   0.83 - 1.16
//   grad_input    256            0.84 - 1.13   0.94 - 1.20      0.85 - 1.00   0.84 - 0.99
//   grad_input    1024           0.82 - 1.02   0.90 - 1.20      0.73 - 1.02   0.78 - 1.18
//   grad_weight   512 - 2048     0.81 - 1.17   0.83 - 1.12      0.77 - 1.23   0.71 - 1.18
//
// For grad_weight the means are 0.91 and 0.95, and both 0.9 in float64. With 256 rows our float32
// kernel is at 0.94 - 1.24. With a bias, blocks of float32 are at 0.93 - 1.19.
constexpr std::array kAmdAvx2Rules = {
    Rule{kAmdAvx2, kFloat32And64, kForward | kBias | kGradInput, 256},
    Rule{kAmdAvx2, kFloat32, kGradWeight, 512},
};

// float32 and float64 on Intel processors, where PyTorch uses MKL. MKL's speed in blocks relative
// to our kernel, measured by foo_ops.tune on an Intel with AMX (a Granite Rapids by its caches),
// means of layers of 512 x 512, 1024 x 2816 and 2816 x 1024, on one thread and on two:
//
//   rows                      16            32            64           256          1024
//   float32 forward      0.99   0.88   0.94   0.88   1.07   1.06   1.16   1.20   1.12   1.14
//           bias         0.95   0.86   0.95   0.91   1.04   1.12   1.13   1.14   1.10   1.13
//           grad_input   1.17   1.08   1.28   1.18   1.16   1.22   1.11   1.21   1.16   1.19
//           grad_weight  1.27   1.09   1.10   1.09   1.02   1.07   1.10   1.14   0.99   1.12
//   float64 forward      1.20   0.64   1.20   0.72   1.22   0.71   1.17   1.13   1.19   1.17
//           grad_input   1.67   0.88   1.39   0.87   1.29   0.87   1.07   1.17   1.24   1.21
//           grad_weight  1.48   1.31   1.25   1.17   1.26   1.14   1.23   1.26   1.15   1.14
//
// Our kernel's speed relative to MKL's on two others, layers of 2816 x 1024:
//
//   rows                                        64            1024
//   Cascade Lake (AVX-512), 2 threads          0.88           0.72
//   Emerald Rapids, 1 thread                   0.93           0.93
//   Emerald Rapids, 2 threads                  0.99           0.87
//
// All else is derived from a Zen 5 whose MKL uses its kernels for Intel's AVX-512, one thread, the
// layers above. Speed relative to MKL, of our kernel and of blocks that MKL computes:
//
//                 rows         float32: ours    in blocks     float64: ours    in blocks
//   forward       16             1.32 - 1.58   0.94 - 1.08      0.85 - 2.43   0.97 - 1.01
//   forward       64             1.09 - 1.31   0.93 - 1.02      0.83 - 1.51   0.99 - 1.00
//   forward       1024           0.86 - 0.94   0.91 - 0.97      0.74 - 0.84   0.96 - 0.97
//   grad_input    16             0.41 - 0.53   0.86 - 0.96      0.47 - 0.61   0.93 - 0.97
//   grad_input    64             0.63 - 0.82   0.92 - 1.02      0.62 - 0.82   0.98 - 1.04
//   grad_input    1024           0.82 - 0.91   0.92 - 0.96      0.74 - 0.79   0.92 - 0.99
//   grad_weight   16             0.55 - 0.91   0.79 - 0.98      0.61 - 0.62   0.89 - 1.05
//   grad_weight   256            0.69 - 0.89   0.90 - 0.98      0.64 - 0.80   0.93 - 0.95
//   grad_weight   1024           0.80 - 0.94   0.90 - 0.95      0.70 - 0.92   0.90 - 0.98
//
// With a bias, a gelu or as a gate, blocks are at 0.88 - 1.12. Blocks lose time to packing
// matrices, while a core of a Cascade Lake multiplies at a third of that Zen 5's rate. With both
// restricted to AVX2, our kernel is at 0.31 - 1.37 and blocks at 0.80 - 1.10.
//
// Forward in float64 with fewer rows, MKL's results depend on the number of threads, even for a
// block on one of them.
//
// bfloat16 on a matrix unit (AMX). On the machine of the first table, oneDNN's speed relative to
// our kernel, on one thread and on two:
//
//   rows              16            64           256           512          1024
//   forward      0.45   0.47   0.66   0.63   1.05   1.01   1.14   0.94   1.17   1.15
//   bias         0.47   0.50   0.67   0.63   0.98   0.92   0.95   0.77   1.03   1.04
//   grad_input   0.85   0.94   0.80   0.76   0.99   0.92   1.13   0.98   1.28   1.24
//   grad_weight  1.85   1.49   1.45   1.12   1.15   1.03   1.04   1.02   0.82   0.96
//
// On 2 to 16 threads of an Emerald Rapids our kernel has 1.17 to 1.33 of oneDNN's speed for 1024
// rows. The two sum in different orders from some depth on: a few of 10,000 results differ. On
// vectors our kernel is 1.6 to 3.8 times as fast.
constexpr std::array kIntelRules = {
    Rule{kIntelAvx2, kFloat32, kForwardAndFinished, 9, kAny, 1 << 21},
    Rule{kIntelAvx512, kFloat32, kForwardAndFinished, 64, kAny, 1 << 21},
    Rule{kIntel, kFloat32, kGradInput | kGradWeight, 9, kAny, 1 << 21},
    Rule{kIntel, kFloat64, kAll, 256, kAny, 1 << 21},
    Rule{kIntel, kFloat64, kGradInput | kGradWeight, 9, kAny, 1 << 21},
    Rule{kIntelMatrixUnit, kBFloat16, kGradWeight, 9, 128},
};

// Never destroyed; tables that were replaced may be in use.
std::atomic<const std::vector<Rule>*> tuned_rules = nullptr;

}  // namespace

void set_tuned_products(const std::vector<TunedProducts>& products) {
  auto* const rules = new std::vector<Rule>();
  for (const auto& [dtype, form, least_rows, most_rows] : products) {
    rules->push_back({.families = set_of({Family::kTuned}),
                      .dtypes = set_of({dtype}),
                      .forms = set_of({form}),
                      .least_rows = least_rows,
                      .most_rows = most_rows});
  }
  tuned_rules.store(rules, std::memory_order_release);
}

Family family_of(const Processor& processor) {
  if (processor.vendor == Vendor::kIntel) {
    if (processor.has_matrix_unit) return Family::kIntelMatrixUnit;
    if (processor.has_bfloat16_dot) return Family::kIntelBFloat16;
    if (processor.has_avx512) return Family::kIntelAvx512;
    if (processor.has_avx2) return Family::kIntelAvx2;
  }
  if (processor.vendor == Vendor::kAmd) {
    if (processor.has_bfloat16_dot) return Family::kAmdBFloat16;
    if (processor.has_avx2 && !processor.has_avx512) return Family::kAmdAvx2;
  }
  return Family::kNone;
}

std::optional<Family> family_of_name(std::string_view name) {
  const auto* const found = std::find(kFamilyNames.begin(), kFamilyNames.end(), name);
  if (found == kFamilyNames.end()) return std::nullopt;
  return static_cast<Family>(found - kFamilyNames.begin());
}

std::string_view name_of(Family family) {
  return kFamilyNames[static_cast<size_t>(family)];
}

bool is_quicker_by_torch(Family family, at::ScalarType dtype, Form form, const ProductSize& size) {
  const auto has = [&](const auto& rules) {
    return std::any_of(rules.begin(), rules.end(), [&](const Rule& rule) {
      return is_in(rule.families, family) && is_in(rule.dtypes, dtype) && is_in(rule.forms, form) &&
             rule.least_rows <= size.rows && size.rows <= rule.most_rows &&
             rule.least_work <= size.work;
    });
  };
  if (family == Family::kTuned) {
    const auto* const rules = tuned_rules.load(std::memory_order_acquire);
    return rules != nullptr && has(*rules);
  }
  return has(kAmdBFloat16Rules) || has(kAmdAvx2Rules) || has(kIntelRules);
}

namespace {

// For some sizes MKL's results depend on the number of threads. So one thread computes a block, and
// the blocks do not depend on the number of threads. On one thread of a Zen 5, MKL with its kernels
// for Intel's AVX-512 takes 1.02 times as long for blocks of 1024 x 1024 as for the whole, 1.05 for
// 512 x 512 and 1.08 for 256 x 512; and three times as long for few rows with less than 256
// columns. So blocks have sides from kLeastSide on until there is one for each of kFewestBlocks
// threads, and from kUsualSide on until there are kMostBlocks. There, one thread has 0.88 to 0.93
// of MKL's speed in float32 for 1024 rows, and 1.1 for 4096; up to 16 threads have equal work,
// where blocks of 2^30 multiplications left 10 of 16 idle for 1024 x 1024 x 2816.
constexpr int64_t kLargestSide = 1024, kUsualSide = 512, kLeastSide = 256;
constexpr double kFewestBlocks = 16, kMostBlocks = 64;
// Elements: blocks begin with a cache line.
constexpr int64_t kLine = 16;
// With fewer rows than this, MKL in float64 takes twice as long if there are fewer columns than
// steps.
constexpr int64_t kRowsOfAnyColumns = 256;

const char* variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// Whether kernels for another processor are requested.
bool has_other_kernels() {
  constexpr std::array names = {"FOO_VECTOR_BITS", "FOO_BFLOAT16_PAIRS", "FOO_MATRIX_UNIT",
                                "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"};
  return std::any_of(names.begin(), names.end(),
                     [](const char* name) { return *variable(name) != '\0'; });
}

Family this_processor() {
#if defined(__x86_64__)
  const Vendor vendor = __builtin_cpu_is("amd")     ? Vendor::kAmd
                        : __builtin_cpu_is("intel") ? Vendor::kIntel
                                                    : Vendor::kOther;
  const bool has_avx2 = __builtin_cpu_supports("avx2");
  const bool has_avx512 = __builtin_cpu_supports("avx512f");
  const bool has_bfloat16_dot = __builtin_cpu_supports("avx512bf16");
  return family_of({vendor, has_avx2, has_avx512, has_bfloat16_dot, at::cpu::init_amx()});
#else
  return Family::kNone;
#endif
}

bool means_this_processor(std::string_view text) {
  return text.empty() || text == "1";
}

Family family_of_text(const std::string& text) {
  if (means_this_processor(text)) return this_processor();
  const auto family = family_of_name(text == "0" ? "none" : std::string_view(text));
  TORCH_CHECK_VALUE(family.has_value(), "FOO_TORCH_PRODUCTS must be 0, 1 or one of ",
                    c10::Join(", ", kFamilyNames), ", got ", text);
  return *family;
}

std::atomic<Family>& current_family() {
  static std::atomic<Family> family = [] {
    const std::string text = variable("FOO_TORCH_PRODUCTS");
    return text.empty() && has_other_kernels() ? Family::kNone : family_of_text(text);
  }();
  return family;
}

// Whether PyTorch has the library that the table is about.
bool has_library(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? at::globalContext().userEnabledMkldnn() : at::hasMKL();
}

Form form_of(const Product& product, Finish finish) {
  if (finish == Finish::kSiluMul) return Form::kGate;
  if (finish != Finish::kNothing) return Form::kActivation;
  if (product.left_step_stride != 1) return Form::kGradWeight;
  if (product.right_step_stride != 1) return Form::kGradInput;
  return product.has_bias ? Form::kBias : Form::kForward;
}

}  // namespace

bool has_no_products_of_torch() {
  return means_this_processor(variable("FOO_TORCH_PRODUCTS")) && !has_other_kernels() &&
         this_processor() == Family::kNone;
}

Family products_family() {
  return current_family().load(std::memory_order_relaxed);
}

std::string set_products_family(const std::string& name) {
  return std::string(name_of(current_family().exchange(family_of_text(name))));
}

bool is_quicker_by_torch(const Product& product, at::ScalarType dtype, Finish finish) {
  const Form form = form_of(product, finish);
  const int64_t rows = form == Form::kGradWeight ? product.depth : product.rows;
  return is_quicker_by_torch(products_family(), dtype, form, {rows, work_of(product)}) &&
         has_library(dtype);
}

namespace {

at::Tensor view(const at::TensorOptions& options, const void* data, int64_t offset,
                c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const auto* const bytes = static_cast<const char*>(data);
  const auto place = offset * static_cast<int64_t>(options.dtype().itemsize());
  return at::from_blob(const_cast<char*>(bytes + place), sizes, strides, options);
}

// Operands of a block as PyTorch tensors. foo's memory is host memory.
struct Operands {
  Operands(at::ScalarType dtype, const Product& product, const ProductBlock& block)
      : options(at::TensorOptions(at::kCPU).dtype(dtype)),
        rows(block.row_stop - block.row_start),
        columns(block.column_stop - block.column_start),
        output(view(options, product.output,
                    block.row_start * product.output_stride + block.column_start, {rows, columns},
                    {product.output_stride, 1})),
        left(view(options, product.left, block.row_start * product.left_row_stride,
                  {rows, product.depth}, {product.left_row_stride, product.left_step_stride})),
        right(right_of(product.right, product, block)) {}

  at::Tensor right_of(const void* matrix, const Product& product, const ProductBlock& block) const {
    return view(options, matrix, block.column_start * product.right_column_stride,
                {product.depth, columns}, {product.right_step_stride, product.right_column_stride});
  }
  // Returns the sums, in a thread's scratch memory.
  at::Tensor sums(void* memory) const {
    return view(options, memory, 0, {rows, columns}, {columns, 1});
  }

  at::TensorOptions options;
  int64_t rows, columns;
  at::Tensor output, left, right;
};

// Halves the longer side of the blocks. So there are 2^n of equal cost, which as many threads, or
// half as many, finish at the same time. `part` is that of a product in a call's work.
Cut cut_for_torch(const Product& product, at::ScalarType dtype, double part = 1.0) {
  const bool is_wide = dtype == at::kDouble && product.rows < kRowsOfAnyColumns;
  int64_t rows = product.rows, columns = product.columns;
  while (true) {
    const auto blocks =
        static_cast<double>(count_of(product.rows, rows) * count_of(product.columns, columns));
    const int64_t least = blocks < part * kFewestBlocks ? kLeastSide
                          : blocks < part * kMostBlocks ? kUsualSide
                                                        : kLargestSide;
    const int64_t least_columns = is_wide ? std::max(product.depth, least) : least;
    const bool can_cut_rows = rows >= 2 * least, can_cut_columns = columns >= 2 * least_columns;
    if (!can_cut_rows && !can_cut_columns) return {rows, columns};
    int64_t& side = can_cut_rows && (rows > columns || !can_cut_columns) ? rows : columns;
    side = count_of(side, 2 * kLine) * kLine;
  }
}

// MKL of a thread computes on that thread alone. On an Intel, MKL that finds itself in a parallel
// region sums in another order than where a process has one thread, unless it is told so.
class OneThreadOfMkl {
 public:
  OneThreadOfMkl() {
    // PyTorch sets MKL's threads in a thread's first call, which would undo ours.
    at::get_num_threads();
    before_ = set(1);
  }
  ~OneThreadOfMkl() { set(before_); }
  OneThreadOfMkl(const OneThreadOfMkl&) = delete;
  OneThreadOfMkl& operator=(const OneThreadOfMkl&) = delete;

 private:
  // Returns the number that was set before.
  static int set(int count) {
    return MKL_Set_Num_Threads_Local == nullptr ? 0 : MKL_Set_Num_Threads_Local(count);
  }

  int before_;
};

// Calls work(thread, job) for each job, on all threads. There are at least two jobs: a single one
// does not begin a parallel region, and MKL would take all threads. cost(job) is for plans.
template <class Work, class Cost>
void share_parts(int64_t jobs, Work work, Cost cost) {
  share_jobs_among(
      at::get_num_threads(), std::max<int64_t>(jobs, 2),
      [&](int64_t thread, auto next) {
        const OneThreadOfMkl one;
        for (int64_t job = next(); job >= 0; job = next()) {
          if (job < jobs) work(thread, job);
        }
      },
      [&](int64_t job) { return job < jobs ? cost(job) : 0.0; });
}

// Calls work(thread, block) for each block of a product.
template <class Work>
void share_blocks(const Product& product, const Cut& cut, Work work) {
  share_parts(
      cut.blocks(product),
      [&](int64_t thread, int64_t job) { work(thread, cut.block(product, job)); },
      [&](int64_t job) {
        return area_of(cut.block(product, job)) * static_cast<double>(product.depth);
      });
}

void multiply_block(at::ScalarType dtype, const Product& product, const ProductBlock& block) {
  Operands operands(dtype, product, block);
  if (product.has_bias) {
    const at::Tensor bias =
        view(operands.options, product.bias, block.column_start * product.bias_stride,
             {operands.columns}, {product.bias_stride});
    at::cpu::addmm_out(operands.output, bias, operands.left, operands.right);
  } else {
    at::cpu::mm_out(operands.output, operands.left, operands.right);
  }
}

// Finishes the sums of a block while they are in the caches.
void multiply_and_finish(const at::Tensor& output, const Product& product, Kernel& finish) {
  auto* const kernel = finish.get<ProductFunction>(output.scalar_type());
  const int64_t parts = product.second == nullptr ? 1 : 2;
  const Cut cut = cut_for_torch(product, output.scalar_type());
  const ProductBlock largest = cut.block(product, 0);
  const int64_t bytes_of_part = largest.row_stop * largest.column_stop * output.itemsize();
  int64_t bytes = 0;
  kernel(&product, &largest, nullptr, &bytes);
  share_blocks(product, cut, [&](int64_t thread, const ProductBlock& block) {
    const ScratchMemory scratch(scratch_pool(), thread, parts * bytes_of_part + bytes);
    auto* const memory = static_cast<char*>(scratch.get());
    const Operands operands(output.scalar_type(), product, block);
    at::Tensor sums = operands.sums(memory);
    at::cpu::mm_out(sums, operands.left, operands.right);
    if (parts == 2) {
      at::Tensor others = operands.sums(memory + sums.nbytes());
      at::cpu::mm_out(others, operands.left, operands.right_of(product.second, product, block));
    }
    Product finished = product;
    finished.left = memory;
    finished.left_row_stride = operands.columns;
    kernel(&finished, &block, memory + parts * bytes_of_part, nullptr);
  });
}

}  // namespace

void multiply_by_torch(const at::Tensor& output, const Product& product, Kernel* finish) {
  RECORD_FUNCTION("foo::linear by aten::mm", c10::ArrayRef<const c10::IValue>{});
  if (output.scalar_type() == at::kBFloat16) {
    multiply_block(at::kBFloat16, product, {0, product.rows, 0, product.columns});
  } else if (finish != nullptr) {
    multiply_and_finish(output, product, *finish);
  } else {
    const Cut cut = cut_for_torch(product, output.scalar_type());
    share_blocks(product, cut, [&](int64_t, const ProductBlock& block) {
      Operands operands(output.scalar_type(), product, block);
      at::cpu::mm_out(operands.output, operands.left, operands.right);
    });
  }
}

void multiply_all_by_torch(const std::vector<Product>& products, at::ScalarType dtype) {
  RECORD_FUNCTION("foo::grouped_linear by aten::mm", c10::ArrayRef<const c10::IValue>{});
  if (dtype == at::kBFloat16) {
    for (const Product& product : products) {
      multiply_block(dtype, product, {0, product.rows, 0, product.columns});
    }
    return;
  }
  double work = 0;
  for (const Product& product : products) work += work_of(product);
  std::vector<std::pair<const Product*, ProductBlock>> blocks;
  for (const Product& product : products) {
    const Cut cut = cut_for_torch(product, dtype, work_of(product) / work);
    for (int64_t block = 0; block < cut.blocks(product); ++block) {
      blocks.emplace_back(&product, cut.block(product, block));
    }
  }
  share_parts(
      static_cast<int64_t>(blocks.size()),
      [&](int64_t, int64_t job) { multiply_block(dtype, *blocks[job].first, blocks[job].second); },
      [&](int64_t job) {
        const auto& [product, block] = blocks[job];
        return area_of(block) * static_cast<double>(product->depth);
      });
}

void add_by_torch(const at::Tensor& output, const Product& product) {
  RECORD_FUNCTION("foo::linear by aten::mm", c10::ArrayRef<const c10::IValue>{});
  const Cut cut = cut_for_torch(product, output.scalar_type());
  share_blocks(product, cut, [&](int64_t, const ProductBlock& block) {
    Operands operands(output.scalar_type(), product, block);
    at::cpu::addmm_out(operands.output, operands.output, operands.left, operands.right);
  });
}

}  // namespace foo
