// Metadata of foo tensors, for backends with their own memory formats: a pair of numbers, and flags
// from torch._utils.set_tensor_metadata. It belongs to the memory and follows it through views,
// copies and files.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "device/allocator.h"

namespace foo::device {

void set_backend_meta(const at::Tensor& tensor, int64_t version, int64_t format_number);
std::optional<Format> get_backend_meta(const at::Tensor& tensor);

// Copies the source's metadata unless the destination has its own.
void copy_backend_meta(const at::Tensor& source, const at::Tensor& destination);

}  // namespace foo::device
