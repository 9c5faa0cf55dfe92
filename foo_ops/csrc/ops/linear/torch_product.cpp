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
#include <string_view>

#include "launch/jobs.h"
#include "ops/linear/cut.h"

namespace foo {

namespace {

// What MKL returns for some sizes depends on the number of threads. So one thread computes a block,
// and blocks are the same for all numbers of them. On one thread of a Zen 5, MKL with its kernels
// for Intel's AVX-512 takes 1.02 times as long for blocks of 1024 x 1024 as for the whole, 1.05 of
// 512 x 512 and 1.08 of 256 x 512; and three times as long with less than 256 columns, of few rows.
constexpr int64_t kLargestSide = 1024, kLeastSide = 256;
// Least and most blocks, each work for a thread: 3 to 5 times as fast as MKL itself on 16 threads.
constexpr double kFewestBlocks = 4, kMostBlocks = 32, kWorkOfBlock = 1 << 30;
// With fewer rows, in float64, MKL takes twice as long for fewer columns than steps.
constexpr int64_t kRowsOfAnyColumns = 256;

const char* variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// Whether the kernels of another processor are asked for.
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

Family family_of_text(const std::string& text) {
  if (text.empty() || text == "1") return this_processor();
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

// Whether PyTorch has the kernels that the table is about.
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

double work_of(const Product& product) {
  return static_cast<double>(product.rows) * static_cast<double>(product.columns) *
         static_cast<double>(product.depth);
}

}  // namespace

Family products_family() {
  return current_family().load(std::memory_order_relaxed);
}

std::string set_products_family(const std::string& name) {
  return std::string(name_of(current_family().exchange(family_of_text(name))));
}

bool is_quicker_by_torch(const Product& product, at::ScalarType dtype, Finish finish) {
  const Form form = form_of(product, finish);
  const int64_t rows = form == Form::kGradWeight ? product.depth : product.rows;
  return is_quicker_by_torch(products_family(), dtype, form,
                             {rows, work_of(product), at::get_num_threads()}) &&
         has_library(dtype);
}

namespace {

at::Tensor view(const at::TensorOptions& options, const void* data, int64_t offset,
                c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const auto* const bytes = static_cast<const char*>(data);
  const auto place = offset * static_cast<int64_t>(options.dtype().itemsize());
  return at::from_blob(const_cast<char*>(bytes + place), sizes, strides, options);
}

// The operands of a block as PyTorch sees them. The memory of foo is host memory.
struct Operands {
  Operands(const at::Tensor& output, const Product& product, const ProductBlock& block)
      : options(output.options().device(at::kCPU)),
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
  // In memory of a thread.
  at::Tensor sums(void* memory) const {
    return view(options, memory, 0, {rows, columns}, {columns, 1});
  }

  at::TensorOptions options;
  int64_t rows, columns;
  at::Tensor output, left, right;
};

// Cuts the longer side of blocks until there are enough of them.
Cut cut_for_torch(const Product& product, at::ScalarType dtype) {
  const double wanted = std::clamp(work_of(product) / kWorkOfBlock, kFewestBlocks, kMostBlocks);
  const bool is_wide = dtype == at::kDouble && product.rows < kRowsOfAnyColumns;
  const int64_t least_columns = is_wide ? std::max(product.depth, kLeastSide) : kLeastSide;
  int64_t rows = part_of(product.rows, kLargestSide, 1);
  int64_t columns = part_of(product.columns, std::max(kLargestSide, 2 * least_columns), 1);
  while (static_cast<double>(count_of(product.rows, rows) * count_of(product.columns, columns)) <
         wanted) {
    const bool cuts_rows = rows > columns || columns < 2 * least_columns;
    if (cuts_rows && rows < 2 * kLeastSide) break;
    int64_t& side = cuts_rows ? rows : columns;
    side = count_of(side, 2);
  }
  return Cut(product, rows, columns, /*threads=*/1);
}

// Calls work(thread, block) for each block of a product. MKL takes all threads where there is one
// job only, which does not begin a parallel region; so there are two.
template <class Work>
void share_blocks(const Product& product, const Cut& cut, Work work) {
  const int64_t blocks = cut.blocks(product);
  share_jobs(std::max<int64_t>(blocks, 2), [&](int64_t thread, auto next) {
    for (int64_t job = next(); job >= 0; job = next()) {
      if (job < blocks) work(thread, cut.block(product, job));
    }
  });
}

void multiply_whole(const at::Tensor& output, const Product& product) {
  Operands operands(output, product, {0, product.rows, 0, product.columns});
  if (product.has_bias) {
    const at::Tensor bias =
        view(operands.options, product.bias, 0, {product.columns}, {product.bias_stride});
    at::cpu::addmm_out(operands.output, bias, operands.left, operands.right);
  } else {
    at::cpu::mm_out(operands.output, operands.left, operands.right);
  }
}

// The sums of a block are finished while they are in the caches.
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
    const Operands operands(output, product, block);
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
    multiply_whole(output, product);
  } else if (finish != nullptr) {
    multiply_and_finish(output, product, *finish);
  } else {
    const Cut cut = cut_for_torch(product, output.scalar_type());
    share_blocks(product, cut, [&](int64_t, const ProductBlock& block) {
      Operands operands(output, product, block);
      at::cpu::mm_out(operands.output, operands.left, operands.right);
    });
  }
}

void add_by_torch(const at::Tensor& output, const Product& product) {
  RECORD_FUNCTION("foo::linear by aten::mm", c10::ArrayRef<const c10::IValue>{});
  const Cut cut = cut_for_torch(product, output.scalar_type());
  share_blocks(product, cut, [&](int64_t, const ProductBlock& block) {
    Operands operands(output, product, block);
    at::cpu::addmm_out(operands.output, operands.output, operands.left, operands.right);
  });
}

}  // namespace foo
