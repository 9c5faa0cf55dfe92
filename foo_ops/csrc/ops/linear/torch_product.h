// PyTorch's own matrix products, and the table of those that are faster than ours.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/kernel_table.h"
#include "ops/linear/product.h"

namespace foo {

enum class Vendor { kAmd, kIntel, kOther };

struct Processor {
  Vendor vendor;
  // The last two are AVX512-BF16 and AMX.
  bool has_avx2, has_avx512, has_bfloat16_dot, has_matrix_unit;
};

// Processors on which PyTorch's kernels and ours use the same instructions.
enum class Family {
  kNone,
  kAmdAvx2,
  kAmdBFloat16,
  kIntelAvx2,
  kIntelAvx512,
  kIntelBFloat16,
  kIntelMatrixUnit,
  kTuned
};
// Values of FOO_TORCH_PRODUCTS, in the order of Family.
inline constexpr std::array<std::string_view, 8> kFamilyNames = {
    "none",         "amd-avx2",       "amd-bfloat16", "intel-avx2",
    "intel-avx512", "intel-bfloat16", "intel-amx",    "tuned"};

Family family_of(const Processor& processor);
std::optional<Family> family_of_name(std::string_view name);
std::string_view name_of(Family family);

// The products of a layer differ in their matrices' strides and in their epilogue: forward alone,
// with a bias, with an activation, or with a second product as its gate.
enum class Form { kForward, kBias, kActivation, kGate, kGradInput, kGradWeight };
inline constexpr std::array<std::string_view, 6> kFormNames = {
    "forward", "bias", "activation", "gate", "grad_input", "grad_weight"};

struct ProductSize {
  // Rows of the layer's input, over which grad_weight sums.
  int64_t rows;
  // Multiplications of one product.
  double work;
};

// Whether PyTorch's kernel is faster. This does not depend on the number of threads, since the two
// kernels sum in different orders.
bool is_quicker_by_torch(Family family, at::ScalarType dtype, Form form, const ProductSize& size);

// A row of the table for the family "tuned", which foo_ops.tune measures: products of these rows.
struct TunedProducts {
  at::ScalarType dtype;
  Form form;
  int64_t least_rows, most_rows;
};
void set_tuned_products(const std::vector<TunedProducts>& products);

// Whether the table has no rows for this processor, and FOO_TORCH_PRODUCTS names no other.
bool has_no_products_of_torch();

// Returns the processor family whose rows of the table apply: this processor's, or the one that
// FOO_TORCH_PRODUCTS names, or kNone. The setter is for tests, and returns the previous family.
Family products_family();
std::string set_products_family(const std::string& name);

// Whether PyTorch's kernel is faster for this product on this processor.
bool is_quicker_by_torch(const Product& product, at::ScalarType dtype, Finish finish);

// Writes left right^T to a contiguous output with PyTorch's CPU kernel. If `finish` is given, it
// adds the bias and finishes the sums; bfloat16 has none, since it would be rounded twice.
void multiply_by_torch(const at::Tensor& output, const Product& product, Kernel* finish);

// The same for independent products, in one parallel loop over blocks, each on one thread.
void multiply_all_by_torch(const std::vector<Product>& products, at::ScalarType dtype);

// Adds left right^T to a contiguous output of the same dtype.
void add_by_torch(const at::Tensor& output, const Product& product);

}  // namespace foo
