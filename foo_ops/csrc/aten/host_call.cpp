#include "aten/host_call.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COW.h>

#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

#include "aten/layouts.h"
#include "device/allocator.h"
#include "device/device.h"
#include "device/guard.h"
#include "device/ownership.h"
#include "launch/memory.h"

namespace foo::aten {
namespace {

// Allocates for the storage of a host alias when it grows: in foo memory, labelled as the CPU's.
class HostAliasAllocator final : public c10::Allocator {
 public:
  explicit HostAliasAllocator(c10::DeviceIndex index) : device_(device::kFoo, index) {}

  c10::DataPtr allocate(size_t bytes) override {
    const device::DeviceGuard guard(device_);
    c10::DataPtr memory = device::allocator().allocate(bytes);
    memory.unsafe_set_device(c10::Device(c10::kCPU));
    return memory;
  }

  // Shared memory must not become copy-on-write for only one of its owners.
  bool is_simple_data_ptr(const c10::DataPtr&) const override { return false; }

  c10::DeleterFnPtr raw_deleter() const override { return device::allocator().raw_deleter(); }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    const DeviceAccess access;
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

}  // namespace

HostStorage::HostStorage(c10::Storage foo)
    : c10::StorageImpl(use_byte_size_t(), static_cast<int64_t>(foo.nbytes()),
                       device::share(foo, c10::Device(c10::kCPU)),
                       host_alias_allocator(foo.device()), foo.resizable()),
      foo_(std::move(foo)),
      first_data_(data()),
      held_open_(first_data_),
      first_bytes_(nbytes()) {
  if (c10::impl::cow::is_cow_data_ptr(data_ptr()))
    set_materializer(&c10::impl::cow::materialize_cow);
}

void HostStorage::release_resources() {
  c10::StorageImpl::release_resources();
  foo_ = c10::Storage();
}

const HostStorage* as_host_storage(const c10::Storage& storage) {
  const c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  return typeid(impl) == typeid(HostStorage) ? static_cast<const HostStorage*>(&impl) : nullptr;
}

c10::DataPtr memory_for_foo(const c10::Storage& host, c10::Device device) {
  return device::is_own_memory(host.data_ptr()) ? device::share(host, device)
                                                : device::adopt(host, device);
}

void move_to_memory_of(const c10::Storage& host, const c10::Storage& foo) {
  if (device::is_own_memory(host.data_ptr())) {
    device::set_memory(foo, device::share(host, foo.device()), host.nbytes());
    return;
  }
  // An alias refers to its foo storage, so the foo storage must not refer to the alias.
  auto* alias = host.unsafeGetStorageImpl();
  const c10::Storage owner(c10::Storage::use_byte_size_t(), host.nbytes(),
                           std::move(alias->mutable_data_ptr()));
  device::set_memory(foo, device::adopt(owner, foo.device()), host.nbytes());
  alias->set_data_ptr_noswap(device::share(foo, c10::Device(c10::kCPU)));
}

c10::Storage foo_storage_of(const c10::Storage& host, const HostStorage& alias) {
  const c10::Storage& foo = alias.foo();
  if (foo.data() == host.data() && foo.nbytes() == host.nbytes()) return foo;
  return device::make_storage(device::share(host, foo.device()), host.nbytes());
}

namespace {

// Keeps ADInplaceOrView, which counts the versions of written tensors, unless it has done so for
// the operator on foo: then it is excluded already.
constexpr c10::DispatchKeySet kExcludedKeys =
    c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;

// Pending operations that are marks on a tensor: the copy needs them too.
constexpr c10::DispatchKeySet kLazyKeys({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});

// Operators on lists of tensors, and a few others, leave it to their kernels to count the versions
// of written tensors.
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
  // A kernel may return a storage from an earlier call.
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
  // Some kernels compute data for the backward pass only then.
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
  // Some kernels leave their result's conjugation or negation pending.
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
  // A tensor without other owners cannot come again.
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
