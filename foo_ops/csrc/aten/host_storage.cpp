#include "aten/host_storage.h"

#include <c10/core/impl/COW.h>

#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

#include "device/allocator.h"
#include "device/device.h"
#include "device/guard.h"
#include "device/ownership.h"
#include "device/storage.h"
#include "launch/device_access.h"

namespace foo::aten {
namespace {

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

  // Memory that is shared must not become copy-on-write for one of those who share it.
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
  // An alias refers to its foo storage, so that one must not refer to the alias.
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

}  // namespace foo::aten
