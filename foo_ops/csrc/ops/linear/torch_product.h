// PyTorch's own products, where they are quicker than ours: the rule is one table.

#pragma once

#include <ATen/core/Tensor.h>

#include "ops/linear/product.h"

namespace foo {

// Whether the table has this product, which is not finished, and this processor.
bool is_quicker_by_torch(const Product& product, at::ScalarType dtype);

// Writes left right^T + bias to a contiguous output by PyTorch's kernel for CPUs.
void multiply_by_torch(const at::Tensor& output, const Product& product);

}  // namespace foo
