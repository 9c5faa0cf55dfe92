#include "device/allocator.h"

#include "device/device.h"
#include "device/device_memory.h"
#include "device/observer.h"
#include "device/ownership.h"
#include "launch/memory.h"

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

namespace {

using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingDeviceAllocator::SegmentInfo;

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex index = current_device();
    return allocate_on(index, bytes, {kFoo, index});
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  bool is_simple_data_ptr(const c10::DataPtr& memory) const override { return is_unshared(memory); }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    const DeviceAccess access;
    default_copy_data(destination, source, bytes);
    observe([&](Observer& observer) { observer.written(destination, bytes); });
  }

  bool initialized() override { return is_initialized(); }

  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      memory_of(index).empty_cache();
    }
  }

  // Every operator is done when it returns, so no stream can still use a freed block.
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    observe([&](Observer& observer) { observer.used_on(memory.get(), stream); });
  }

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    check_device_index(index);
    return memory_of(index).statistics();
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    check_device_index(index);
    memory_of(index).reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    check_device_index(index);
    memory_of(index).reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    check_device_index(index);
    return memory_of(index).free_and_total();
  }
};

Allocator& instance() {
  static auto* allocator = new Allocator();
  return *allocator;
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &instance());

}  // namespace

c10::DeviceAllocator& allocator() {
  return instance();
}

void set_memory_fraction(double fraction, c10::DeviceIndex index) {
  check_device_index(index);
  TORCH_CHECK_VALUE(fraction >= 0 && fraction <= 1,
                    "foo: memory fraction must be from 0 to 1, got ", fraction);
  memory_of(index).set_fraction(fraction);
}

double memory_fraction(c10::DeviceIndex index) {
  check_device_index(index);
  return memory_of(index).fraction();
}

std::vector<SegmentInfo> memory_snapshot() {
  std::vector<SegmentInfo> segments;
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    memory_of(index).append_snapshot(segments);
  }
  return segments;
}

}  // namespace foo::device
