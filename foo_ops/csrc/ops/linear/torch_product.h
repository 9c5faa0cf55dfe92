// PyTorch's own products, and the table that says where they are quicker than ours.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "launch/kernel_table.h"
#include "ops/linear/product.h"

namespace foo {

// Which products of matrices PyTorch's kernels compute quicker than ours: one table, by processor.

enum class Vendor { kAmd, kIntel, kOther };

struct Processor {
  Vendor vendor;
  // AVX512-BF16 and AMX are the last two.
  bool has_avx2, has_avx512, has_bfloat16_dot, has_matrix_unit;
};

// Processors on which both kinds of kernels have the same instructions.
enum class Family {
  kNone,
  kAmdAvx2,
  kAmdBFloat16,
  kIntelAvx2,
  kIntelAvx512,
  kIntelBFloat16,
  kIntelMatrixUnit
};
// As FOO_TORCH_PRODUCTS has them, in the order of the families.
inline constexpr std::array<std::string_view, 7> kFamilyNames = {
    "none",         "amd-avx2",       "amd-bfloat16", "intel-avx2",
    "intel-avx512", "intel-bfloat16", "intel-amx"};

Family family_of(const Processor& processor);
std::optional<Family> family_of_name(std::string_view name);
std::string_view name_of(Family family);

// The products of a layer differ in how their matrices lie in memory, and in what is done to the
// sums: forward alone, with a bias, with an activation, and with a second product as its gate.
enum class Form { kForward, kBias, kActivation, kGate, kGradInput, kGradWeight };
inline constexpr std::array<std::string_view, 6> kFormNames = {
    "forward", "bias", "activation", "gate", "grad_input", "grad_weight"};

struct ProductSize {
  // Rows of the layer's input, over which grad_weight sums.
  int64_t rows;
  // Multiplications, those of one product.
  double work;
  int64_t threads;
};

// Whether PyTorch's kernel is the quicker one.
bool is_quicker_by_torch(Family family, at::ScalarType dtype, Form form, const ProductSize& size);

// PyTorch's own products, where they are quicker than ours: torch_product.h.

// The processor whose rows of the table hold: this one, or that which FOO_TORCH_PRODUCTS names, or
// none of them. The setter is for tests, and returns the family before.
Family products_family();
std::string set_products_family(const std::string& name);

// Whether the table has a product of this processor.
bool is_quicker_by_torch(const Product& product, at::ScalarType dtype, Finish finish);

// Writes left right^T to a contiguous output by PyTorch's kernel for CPUs. Where there is a kernel
// to finish the sums, it adds the bias, too; bfloat16 has none, since it would be rounded twice.
void multiply_by_torch(const at::Tensor& output, const Product& product, Kernel* finish);

// Adds left right^T to a contiguous output of the same dtype.
void add_by_torch(const at::Tensor& output, const Product& product);

}  // namespace foo
