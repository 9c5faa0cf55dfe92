#include "device/storage.h"

#include "device/allocator.h"
#include "device/device.h"

namespace foo::device {
namespace {

c10::intrusive_ptr<c10::StorageImpl> make_storage_impl(c10::StorageImpl::use_byte_size_t by_size,
                                                       c10::SymInt bytes, c10::DataPtr memory,
                                                       c10::Allocator* allocator, bool resizable) {
  if (memory == nullptr) {
    memory = allocator->allocate(static_cast<size_t>(bytes.guard_int(__FILE__, __LINE__)));
  }
  TORCH_CHECK(memory.device().type() == kFoo, "foo: memory of a storage must be on foo, got ",
              memory.device());
  return c10::make_intrusive<StorageImpl>(by_size, std::move(bytes), std::move(memory), allocator,
                                          resizable);
}

const bool storage_registered = [] {
  c10::SetStorageImplCreate(kFoo, &make_storage_impl);
  return true;
}();

}  // namespace

c10::Storage make_storage(c10::DataPtr memory, size_t bytes) {
  return c10::Storage(make_storage_impl(c10::StorageImpl::use_byte_size_t(),
                                        static_cast<int64_t>(bytes), std::move(memory),
                                        &allocator(), true));
}

void set_memory(const c10::Storage& storage, c10::DataPtr memory, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(memory));
  impl->clear_materializer();
  impl->set_nbytes(bytes);
}

}  // namespace foo::device
