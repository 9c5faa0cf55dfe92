#include "aten/host_call.h"

#include <c10/core/TensorImpl.h>

#include <memory>
#include <utility>
#include <vector>

#include "aten/layouts.h"
#include "device/allocator.h"
#include "device/device.h"
#include "device/storage.h"

namespace foo::aten {
namespace {

constexpr c10::DispatchKeySet kExcludedKeys =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

// Pending operations that a tensor bears as a mark: the copy must bear it too.
constexpr c10::DispatchKeySet kLazyKeys({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});

void release_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

// Keeps the foo storage alive, for the case that a kernel keeps its argument.
c10::DataPtr host_view_of(const c10::Storage& foo) {
  auto* owner = foo.unsafeGetStorageImpl();
  void* data = owner->mutable_data();
  c10::raw::intrusive_ptr::incref(owner);
  return {data, owner, &release_storage, c10::Device(c10::kCPU)};
}

// Where the storage of a host alias grows: in foo memory, with the label of the CPU.
class HostAliasAllocator final : public c10::Allocator {
 public:
  explicit HostAliasAllocator(c10::DeviceIndex index) : device_(device::kFoo, index) {}

  c10::DataPtr allocate(size_t bytes) override {
    const device::DeviceGuard guard(device_);
    c10::DataPtr memory = device::allocator().allocate(bytes);
    memory.unsafe_set_device(c10::Device(c10::kCPU));
    return memory;
  }

  c10::DeleterFnPtr raw_deleter() const override { return device::allocator().raw_deleter(); }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

 private:
  c10::Device device_;
};

HostAliasAllocator* host_alias_allocator(c10::Device device) {
  // Never destroyed: a storage may outlive the static objects of this library.
  static const auto* allocators = [] {
    auto* list = new std::vector<std::unique_ptr<HostAliasAllocator>>();
    for (c10::DeviceIndex index = 0; index < device::device_count(); ++index) {
      list->push_back(std::make_unique<HostAliasAllocator>(index));
    }
    return list;
  }();
  return (*allocators)[device.index()].get();
}

// A tensor like `source` in everything but the memory and the device.
at::Tensor with_storage(const at::Tensor& source, c10::Storage storage, c10::DispatchKey backend) {
  const auto* source_impl = source.unsafeGetTensorImpl();
  const auto keys = c10::DispatchKeySet(backend) | (source_impl->key_set() & kLazyKeys);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, source.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  if (source_impl->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

c10::DataPtr to_foo_memory(const c10::Storage& host, c10::Device device) {
  auto& memory = host.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (!device::is_own_memory(memory)) return device::adopt(host, device);
  c10::DataPtr own = std::move(memory);
  own.unsafe_set_device(device);
  return own;
}

void copy_layout(const at::Tensor& source, const at::Tensor& destination) {
  if (source.sizes() == destination.sizes() && source.strides() == destination.strides() &&
      source.storage_offset() == destination.storage_offset()) {
    return;
  }
  destination.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(),
                                                           source.storage_offset());
}

}  // namespace

HostCall::HostCall(c10::Device device, c10::Device result_device)
    : result_device_(result_device),
      device_guard_(device.type() == device::kFoo ? device : result_device),
      host_tensors_in_device_memory_(result_device.type() == device::kFoo ? result_device.index()
                                                                          : device::kNoDevice),
      below_autograd_(kExcludedKeys) {}

c10::Storage HostCall::storage_to_host(const c10::Storage& foo) {
  if (const c10::Storage* known = storages_.host_of(foo)) return *known;
  c10::Storage host(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(foo.nbytes()), host_view_of(foo),
      host_alias_allocator(foo.device()), foo.resizable()));
  storages_.add(foo, host);
  return host;
}

c10::Storage HostCall::storage_to_foo(const c10::Storage& host) {
  if (const c10::Storage* known = storages_.foo_of(host)) return *known;
  c10::Storage foo = device::make_storage(to_foo_memory(host, result_device_), host.nbytes());
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
  return host;
}

void HostCall::write_back() {
  for (const auto& [foo, host] : storages_) write_back(foo, host);
  for (const auto& [foo, host] : tensors_) write_back(foo, host);
}

void HostCall::write_back(const c10::Storage& foo, const c10::Storage& host) {
  if (foo.data() == host.data() && foo.nbytes() == host.nbytes()) return;
  auto* impl = foo.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(to_foo_memory(host, foo.device()));
  impl->set_nbytes(host.nbytes());
  host.unsafeGetStorageImpl()->set_data_ptr_noswap(host_view_of(foo));
}

void HostCall::write_back(const at::Tensor& foo, const at::Tensor& host) {
  if (!is_dense(host)) {
    update(foo, host, parts_to_foo());
    return;
  }
  c10::Storage storage = storage_to_foo(host.storage());
  if (!storage.is_alias_of(foo.storage())) {
    foo.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  }
  copy_layout(host, foo);
  // Some kernels leave a conjugation or negation of their result pending.
  if (host.is_conj() != foo.is_conj()) foo._set_conj(host.is_conj());
  if (host.is_neg() != foo.is_neg()) foo._set_neg(host.is_neg());
}

PartMap HostCall::parts_to_foo() {
  return {[this](const at::Tensor& part) { return to_foo(part); },
          [this](const c10::Storage& part) { return storage_to_foo(part); }};
}

PartMap HostCall::parts_to_host() {
  return {[this](const at::Tensor& part) { return to_host(part); },
          [this](const c10::Storage& part) { return storage_to_host(part); }};
}

at::Tensor HostCall::to_foo(const at::Tensor& host) {
  if (!host.defined() || !host.is_cpu()) return host;
  if (const at::Tensor* known = tensors_.foo_of(host)) return *known;
  if (result_device_.is_cpu()) return host;
  if (!is_dense(host)) return rebuild(host, result_device_, parts_to_foo());
  if (host_storages_.foo_of(host.storage())) return host;
  return with_storage(host, storage_to_foo(host.storage()), c10::DispatchKey::PrivateUse1);
}

std::optional<at::Tensor> foo_tensor_over(const at::Tensor& host) {
  if (!host.has_storage()) return std::nullopt;
  const c10::DataPtr& memory = host.storage().data_ptr();
  if (memory.get_deleter() != &release_storage) return std::nullopt;
  auto* foo = static_cast<c10::StorageImpl*>(memory.get_context());
  return with_storage(host, c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(foo),
                      c10::DispatchKey::PrivateUse1);
}

}  // namespace foo::aten
