#include "aten/host_call.h"

#include <c10/core/TensorImpl.h>

#include <memory>
#include <utility>
#include <vector>

#include "aten/host_storage.h"
#include "aten/layouts.h"
#include "device/allocator.h"
#include "device/device.h"
#include "device/storage.h"

namespace foo::aten {
namespace {

// Not ADInplaceOrView: it counts the versions of tensors that are written, unless it has done so
// for the operator on foo, and then it is excluded already.
constexpr c10::DispatchKeySet kExcludedKeys =
    c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;

// Pending operations that a tensor bears as a mark: the copy must bear it too.
constexpr c10::DispatchKeySet kLazyKeys({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});

// Operators on lists of tensors, and a few others, leave it to their kernels to count the versions
// of what they write.
void count_versions(const at::Tensor& host, const at::Tensor& foo) {
  if (host.is_inference() || foo.is_inference()) return;
  for (int64_t version = host._version(); version > 0; --version) {
    foo.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

at::Tensor with_storage(const at::Tensor& source, c10::Storage storage, c10::DispatchKey backend) {
  const auto* source_impl = source.unsafeGetTensorImpl();
  const auto keys = c10::DispatchKeySet(backend) | (source_impl->key_set() & kLazyKeys);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, source.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  if (source_impl->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

HostCall::Layout::Layout(const at::Tensor& tensor)
    : storage(tensor.storage().unsafeGetStorageImpl()), offset(tensor.storage_offset()) {
  dimensions.set_sizes(tensor.sizes());
  dimensions.set_strides(tensor.strides());
}

bool HostCall::Layout::is_of(const at::Tensor& tensor) const {
  return storage == tensor.storage().unsafeGetStorageImpl() && offset == tensor.storage_offset() &&
         dimensions.sizes_arrayref() == tensor.sizes() &&
         dimensions.strides_arrayref() == tensor.strides();
}

HostCall::HostCall(c10::Device device, c10::Device result_device)
    : result_device_(result_device),
      device_guard_(device.type() == device::kFoo ? device : result_device),
      host_tensors_in_device_memory_(result_device.type() == device::kFoo ? result_device.index()
                                                                          : device::kNoDevice),
      below_autograd_(kExcludedKeys) {}

c10::Storage HostCall::storage_to_host(const c10::Storage& foo) {
  if (const c10::Storage* known = storages_.host_of(foo)) return *known;
  c10::Storage host(c10::make_intrusive<HostStorage>(foo));
  storages_.add(foo, host);
  return host;
}

c10::Storage HostCall::storage_to_foo(const c10::Storage& host) {
  if (const c10::Storage* known = storages_.foo_of(host)) return *known;
  // A kernel may return what it was given in another call.
  const HostStorage* alias = as_host_storage(host);
  c10::Storage foo =
      alias != nullptr ? foo_storage_of(host, *alias)
                       : device::make_storage(memory_for_foo(host, result_device_), host.nbytes());
  storages_.add(foo, host);
  return foo;
}

at::Tensor HostCall::to_host(const at::Tensor& tensor) {
  if (tensor.device().type() != device::kFoo) {
    if (tensor.has_storage()) host_storages_.add(tensor.storage(), tensor.storage());
    return tensor;
  }
  if (const at::Tensor* known = tensors_.host_of(tensor)) return *known;
  at::Tensor host;
  if (is_dense(tensor)) {
    host = with_storage(tensor, storage_to_host(tensor.storage()), c10::DispatchKey::CPU);
  } else {
    host = rebuild(tensor, c10::kCPU, parts_to_host());
  }
  // Some kernels compute only then what the backward pass needs.
  if (tensor.requires_grad()) host.set_requires_grad(true);
  tensors_.add(tensor, host);
  layouts_.push_back(is_dense(host) ? Layout(host) : Layout());
  return host;
}

void HostCall::write_back() {
  for (const auto& [foo, host] : storages_) {
    if (as_host_storage(host)->has_moved()) move_to_memory_of(host, foo);
  }
  const Layout* layout = layouts_.begin();
  for (const auto& [foo, host] : tensors_) write_back(foo, host, *layout++);
}

void HostCall::write_back(const at::Tensor& foo, const at::Tensor& host, const Layout& before) {
  if (!is_dense(host)) {
    update(foo, host, parts_to_foo());
    return;
  }
  if (!before.is_of(host)) {
    auto* impl = foo.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(storage_to_foo(host.storage()));
    impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
  count_versions(host, foo);
  // Some kernels leave a conjugation or negation of their result pending.
  if (host.is_conj() != foo.is_conj()) foo._set_conj(host.is_conj());
  if (host.is_neg() != foo.is_neg()) foo._set_neg(host.is_neg());
}

PartMap HostCall::parts_to_foo() {
  return {[this](const at::Tensor& part) { return part_to_foo(part); },
          [this](const c10::Storage& part) { return storage_to_foo(part); }};
}

PartMap HostCall::parts_to_host() {
  return {[this](const at::Tensor& part) { return to_host(part); },
          [this](const c10::Storage& part) { return storage_to_host(part); }};
}

at::Tensor HostCall::to_foo(const at::Tensor& host) {
  at::Tensor foo = part_to_foo(host);
  // A storage that nobody else has cannot come again.
  if (host.use_count() > 1 && !foo.is_same(host)) tensors_.add(foo, host);
  return foo;
}

at::Tensor HostCall::part_to_foo(const at::Tensor& host) {
  if (!host.defined() || !host.is_cpu()) return host;
  if (const at::Tensor* known = tensors_.foo_of(host)) return *known;
  if (result_device_.is_cpu()) return host;
  if (!is_dense(host)) return rebuild(host, result_device_, parts_to_foo());
  if (host_storages_.foo_of(host.storage())) return host;
  return with_storage(host, storage_to_foo(host.storage()), c10::DispatchKey::PrivateUse1);
}

std::optional<at::Tensor> foo_tensor_over(const at::Tensor& host) {
  if (!host.has_storage()) return std::nullopt;
  const HostStorage* alias = as_host_storage(host.storage());
  if (alias == nullptr) return std::nullopt;
  return with_storage(host, foo_storage_of(host.storage(), *alias), c10::DispatchKey::PrivateUse1);
}

}  // namespace foo::aten
