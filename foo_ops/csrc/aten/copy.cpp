// Copies between tensors and to Python numbers: strided, converting, across devices.

#include <ATen/ops/_lazy_clone_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/copy_ops.h>
#include <c10/core/impl/COW.h>

#include "aten/fallback.h"
#include "aten/host_call.h"
#include "aten/observers.h"
#include "device/backend_meta.h"
#include "device/device.h"
#include "device/stream.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

void check_copyable(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.device().type() == device::kFoo || tensor.is_cpu(),
                              "foo: copies must be from or to cpu or foo, got ", tensor.device());
}

// A blocking copy between host and device synchronizes with the device.
void report_blocking_copy(const at::Tensor& source, const at::Tensor& destination,
                          bool non_blocking) {
  if (device::reports_synchronization() && !non_blocking &&
      source.device().type() != destination.device().type()) {
    device::report_synchronization("aten::copy_");
  }
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  if (device::reports_synchronization()) device::report_synchronization("aten::item");
  return at::native::_local_scalar_dense_cpu(self);
}

// Copies with at least one tensor on foo. The copy is done on return: non_blocking promises no
// more.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  check_copyable(source);
  check_copyable(destination);
  report_blocking_copy(source, destination, non_blocking);
  HostCall call(destination.is_cpu() ? source.device() : destination.device());
  at::Tensor host_destination = call.to_host(destination);
  at::_ops::copy_::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), host_destination,
                              call.to_host(source), non_blocking);
  call.write_back();
  device::copy_backend_meta(source, destination);
  return destination;
}

at::Tensor copy_quantized_from(const at::Tensor& source, const at::Tensor& destination,
                               bool non_blocking) {
  check_copyable(source);
  check_copyable(destination);
  report_blocking_copy(source, destination, non_blocking);
  HostCall call(destination.is_cpu() ? source.device() : destination.device());
  at::Tensor host_destination = call.to_host(destination);
  at::_ops::copy_::redispatch(c10::DispatchKeySet(c10::DispatchKey::QuantizedCPU), host_destination,
                              call.to_host(source), non_blocking);
  call.write_back();
  return destination;
}

// Copies sparse and nested tensors part by part; torch has no _copy_from for them.
at::Tensor& copy_(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& source,
                  bool non_blocking) {
  check_copyable(source);
  check_copyable(self);
  report_blocking_copy(source, self, non_blocking);
  HostCall call(self.is_cpu() ? source.device() : self.device());
  at::Tensor host_self = call.to_host(self);
  at::_ops::copy_::redispatch(host_keys(keys), host_self, call.to_host(source), non_blocking);
  call.write_back();
  return self;
}

// Memory shared with data that a kernel keeps cannot become copy-on-write. Neither can memory in a
// graph, which would lack the later copy.
at::Tensor lazy_clone(const at::Tensor& self) {
  const c10::StorageImpl& storage = *self.storage().unsafeGetStorageImpl();
  const bool can_be_lazy = c10::impl::cow::has_simple_data_ptr(storage) ||
                           c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
  const bool is_captured = InCapturedOperator::is_there();
  return can_be_lazy && !is_captured ? at::native::_lazy_clone(self) : self.clone();
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_copy_from", &copy_from, Devices::kAny>(library);
  register_own_kernel<"aten::_copy_from_and_resize", &copy_from_and_resize, Devices::kAny>(library);
  register_own_kernel<"aten::_lazy_clone", &lazy_clone>(library);
  register_own_kernel<"aten::_local_scalar_dense", &local_scalar_dense>(library);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  register_own_kernel<"aten::copy_", &copy_, Devices::kAny>(library);
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, library) {
  register_own_kernel<"aten::copy_", &copy_, Devices::kAny>(library);
}

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, library) {
  register_own_kernel<"aten::copy_", &copy_, Devices::kAny>(library);
}

// Quantized tensors: copies the bytes and the quantizer.
TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, library) {
  register_own_kernel<"aten::_copy_from", &copy_quantized_from, Devices::kAny>(library);
}

// The copy itself applies a pending conjugation or negation. torch would resolve it before the call
// with another copy, in an endless recursion.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

}  // namespace foo::aten
