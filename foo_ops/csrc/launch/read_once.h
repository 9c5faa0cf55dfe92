// Snapshots of numbers, such as indices, that are checked before they are used.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <cstring>

namespace foo {

// Copies a tensor's elements to contiguous host memory of the call: another thread that writes to
// the tensor cannot change them between a check and its use.
inline at::Tensor read_once(const at::Tensor& tensor) {
  // Copies already.
  if (!tensor.is_contiguous()) return tensor.contiguous();
  const at::Tensor copy = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  if (tensor.numel() > 0) {
    std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  }
  return copy;
}

}  // namespace foo
