// Tensors that are more than a storage with strides: quantized, sparse and nested ones. They are
// rebuilt on another device from the same parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace foo::aten {

// Maps a part of a tensor to its counterpart on the other device.
struct PartMap {
  std::function<at::Tensor(const at::Tensor&)> tensor;
  std::function<c10::Storage(const c10::Storage&)> storage;
};

// Whether a tensor is just a storage with strides.
bool is_dense(const at::Tensor& tensor);

// Rebuilds the tensor for another backend, over the counterparts of its parts. Raises for layouts
// that foo does not have.
at::Tensor rebuild(const at::Tensor& source, c10::Device device, const PartMap& map);

// Updates the member tensors of `destination` to those that `source` has now. One was rebuilt from
// the other, so both are of the same kind.
void update(const at::Tensor& destination, const at::Tensor& source, const PartMap& map);

}  // namespace foo::aten
