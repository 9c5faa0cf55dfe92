#include "aten/layouts.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_nested_tensor_size_native.h>
#include <ATen/ops/_nested_tensor_storage_offsets_native.h>
#include <ATen/ops/_nested_tensor_strides_native.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/InferenceMode.h>

#include "device/guard.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Returns the dispatch keys of the tensor's kind on the CPU or on foo.
DispatchKeySet keys_on(const at::Tensor& source, c10::Device device) {
  const auto functionality = source.is_quantized()                       ? DispatchKey::Quantized
                             : source.unsafeGetTensorImpl()->is_nested() ? DispatchKey::NestedTensor
                             : source.layout() == c10::kSparse           ? DispatchKey::Sparse
                                                                         : DispatchKey::SparseCsr;
  const auto backend =
      device.is_cpu() ? c10::BackendComponent::CPUBit : c10::BackendComponent::PrivateUse1Bit;
  const DispatchKeySet keys(c10::toRuntimePerBackendFunctionalityKey(functionality, backend));
  // Tensor constructors add only the autograd key of the backend.
  const bool has_second_autograd_key =
      functionality == DispatchKey::NestedTensor && !c10::InferenceMode::is_enabled();
  return has_second_autograd_key ? keys.add(DispatchKey::AutogradNestedTensor) : keys;
}

template <class Impl>
Impl* impl_of(const at::Tensor& tensor) {
  return static_cast<Impl*>(tensor.unsafeGetTensorImpl());
}

void set_parts(at::SparseTensorImpl* destination, const at::Tensor& source, const PartMap& map) {
  const auto* parts = impl_of<at::SparseTensorImpl>(source);
  destination->raw_resize_(parts->sparse_dim(), parts->dense_dim(), source.sizes());
  destination->set_indices_and_values_unsafe(map.tensor(parts->indices()),
                                             map.tensor(parts->values()));
  destination->set_coalesced(parts->coalesced());
}

void set_parts(at::SparseCsrTensorImpl* destination, const at::Tensor& source, const PartMap& map) {
  const auto* parts = impl_of<at::SparseCsrTensorImpl>(source);
  destination->set_layout(source.layout());
  destination->set_member_tensors(map.tensor(parts->compressed_indices()),
                                  map.tensor(parts->plain_indices()), map.tensor(parts->values()),
                                  source.sizes());
}

// Maps the quantizer: scales per channel are tensors, and so on a device.
at::QuantizerPtr quantizer_of(const at::Tensor& source, c10::Device device, const PartMap& map) {
  at::QuantizerPtr quantizer = impl_of<at::QTensorImpl>(source)->quantizer();
  // An empty tensor's quantizer has no scheme yet and raises for it.
  const auto* channels = dynamic_cast<at::PerChannelAffineQuantizer*>(quantizer.get());
  if (channels == nullptr) return quantizer;
  // A copy on another device first has its source's scales.
  const at::Tensor scales = map.tensor(channels->scales()).to(device);
  const at::Tensor zero_points = map.tensor(channels->zero_points()).to(device);
  if (quantizer->qscheme() == at::kPerChannelAffine) {
    return c10::make_intrusive<at::PerChannelAffineQuantizer>(quantizer->scalar_type(), scales,
                                                              zero_points, channels->axis());
  }
  return c10::make_intrusive<at::PerChannelAffineFloatQParamsQuantizer>(
      quantizer->scalar_type(), scales, zero_points, channels->axis());
}

void set_parts(at::QTensorImpl* destination, const at::Tensor& source, const PartMap& map) {
  destination->set_storage_keep_dtype(map.storage(source.storage()));
  destination->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  destination->set_quantizer_(quantizer_of(source, destination->device(), map));
}

bool is_compressed(const at::Tensor& tensor) {
  return at::sparse_csr::is_sparse_compressed(tensor.layout());
}

}  // namespace

bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_quantized() &&
         !tensor.unsafeGetTensorImpl()->is_nested();
}

at::Tensor rebuild(const at::Tensor& source, c10::Device device, const PartMap& map) {
  const DispatchKeySet keys = keys_on(source, device);
  if (source.is_quantized()) {
    at::Tensor result = at::detail::make_tensor<at::QTensorImpl>(
        map.storage(source.storage()), keys, source.dtype(), quantizer_of(source, device, map));
    result.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(),
                                                        source.storage_offset());
    return result;
  }
  if (source.unsafeGetTensorImpl()->is_nested()) {
    // Sizes, strides and offsets of nested tensors are always on the CPU.
    const auto* nested = impl_of<at::native::NestedTensorImpl>(source);
    return at::detail::make_tensor<at::native::NestedTensorImpl>(
        map.storage(source.storage()), keys, source.dtype(), nested->get_nested_sizes(),
        nested->get_nested_strides(), nested->get_storage_offsets());
  }
  if (source.layout() == c10::kSparse) {
    // The constructor makes empty parts on the current device.
    const c10::OptionalDeviceGuard guard(device);
    at::Tensor result = at::detail::make_tensor<at::SparseTensorImpl>(keys, source.dtype());
    set_parts(impl_of<at::SparseTensorImpl>(result), source, map);
    return result;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(is_compressed(source), "foo: tensors of layout ", source.layout(),
                              " are not supported");
  at::Tensor result = at::detail::make_tensor<at::SparseCsrTensorImpl>(
      keys, device, source.layout(), source.dtype());
  set_parts(impl_of<at::SparseCsrTensorImpl>(result), source, map);
  return result;
}

void update(const at::Tensor& destination, const at::Tensor& source, const PartMap& map) {
  if (source.is_quantized()) {
    set_parts(impl_of<at::QTensorImpl>(destination), source, map);
  } else if (source.layout() == c10::kSparse) {
    set_parts(impl_of<at::SparseTensorImpl>(destination), source, map);
  } else if (is_compressed(source)) {
    set_parts(impl_of<at::SparseCsrTensorImpl>(destination), source, map);
  }
}

// Parts of the tensor that stay on the CPU.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, library) {
  register_own_kernel<"aten::_nested_tensor_size", &at::native::_nested_tensor_size>(library);
  register_own_kernel<"aten::_nested_tensor_strides", &at::native::_nested_tensor_strides>(library);
  register_own_kernel<"aten::_nested_tensor_storage_offsets",
                      &at::native::_nested_tensor_storage_offsets>(library);
}

}  // namespace foo::aten
