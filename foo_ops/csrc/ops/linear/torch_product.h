// PyTorch's own products, where they are quicker than ours: product_table.h.

#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "launch/kernel_table.h"
#include "ops/linear/product.h"
#include "ops/linear/product_table.h"

namespace foo {

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
