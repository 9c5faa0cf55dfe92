// Numbers that are checked before they are used, such as indices.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <cstring>

namespace foo {

// The elements of a tensor in memory of the call, adjacent and on the host: another thread that
// writes to the tensor changes nothing there between a check and what relies on it.
inline at::Tensor read_once(const at::Tensor& tensor) {
  // A copy already.
  if (!tensor.is_contiguous()) return tensor.contiguous();
  const at::Tensor copy = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  if (tensor.numel() > 0) {
    std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  }
  return copy;
}

}  // namespace foo
