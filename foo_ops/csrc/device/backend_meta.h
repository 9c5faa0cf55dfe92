// What a tensor of foo may bear, as backends with memory formats of their own use it: a pair of
// numbers, and flags that torch._utils.set_tensor_metadata gave. It belongs to the memory, and goes
// with it through views, copies and files.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "device/allocator.h"

namespace foo::device {

void set_backend_meta(const at::Tensor& tensor, int64_t version, int64_t format_number);
std::optional<Format> get_backend_meta(const at::Tensor& tensor);

// Copies bear what the source bears, unless the destination has its own.
void copy_backend_meta(const at::Tensor& source, const at::Tensor& destination);

}  // namespace foo::device
