// A pair of numbers that a tensor of foo may bear, as backends with memory formats of their own
// use it. It goes with the tensor through copies and files.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace foo::device {

// Version and number of a format.
using FormatPair = std::pair<int64_t, int64_t>;

void set_backend_meta(const at::Tensor& tensor, int64_t version, int64_t format_number);
std::optional<FormatPair> get_backend_meta(const at::Tensor& tensor);

// For copies: what the source bears, unless the destination has its own.
void copy_backend_meta(const at::Tensor& source, const at::Tensor& destination);

}  // namespace foo::device
