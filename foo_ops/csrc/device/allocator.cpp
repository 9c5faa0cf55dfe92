#include "device/allocator.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

#include "device/device.h"

namespace foo::device {
namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

// Stands before each block, so that the context of a block is its own address: that is what
// raw_deleter and copy-on-write storages ask for.
struct alignas(kAlignment) Header {
  size_t requested_bytes;
  size_t block_bytes;
  c10::DeviceIndex device;
};
static_assert(sizeof(Header) == kAlignment);

struct AdoptedMemory {
  c10::Storage host;
  size_t bytes;
  c10::DeviceIndex device;
};

auto& aggregate(StatArray& statistic) {
  return statistic[static_cast<size_t>(StatType::AGGREGATE)];
}

// A view over the figures of DeviceStats that apply where every block is a segment of its own.
template <typename Function>
void for_each_figure(DeviceStats& statistics, Function function) {
  for (StatArray* statistic :
       {&statistics.allocation, &statistics.segment, &statistics.active, &statistics.inactive_split,
        &statistics.allocated_bytes, &statistics.reserved_bytes, &statistics.active_bytes,
        &statistics.inactive_split_bytes, &statistics.requested_bytes}) {
    for (auto& figure : *statistic) function(figure);
  }
  function(statistics.oversize_allocations);
  function(statistics.oversize_segments);
}

class Account {
 public:
  void record_allocation(void* address, size_t requested_bytes, size_t block_bytes,
                         c10::Device device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (StatArray* count : counts()) aggregate(*count).increase(1);
    for (StatArray* bytes : byte_counts()) aggregate(*bytes).increase(block_bytes);
    aggregate(statistics_.requested_bytes).increase(requested_bytes);
    ++statistics_.num_device_alloc;
    report(address, static_cast<int64_t>(block_bytes), device);
  }

  void record_free(void* address, size_t requested_bytes, size_t block_bytes, c10::Device device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (StatArray* count : counts()) aggregate(*count).decrease(1);
    for (StatArray* bytes : byte_counts()) aggregate(*bytes).decrease(block_bytes);
    aggregate(statistics_.requested_bytes).decrease(requested_bytes);
    ++statistics_.num_device_free;
    report(address, -static_cast<int64_t>(block_bytes), device);
  }

  size_t record_out_of_memory() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++statistics_.num_ooms;
    return aggregate(statistics_.allocated_bytes).current;
  }

  DeviceStats statistics() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return statistics_;
  }

  void reset_accumulated() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_each_figure(statistics_, [](auto& figure) { figure.reset_accumulated(); });
    statistics_.num_alloc_retries = 0;
    statistics_.num_ooms = 0;
    statistics_.num_device_alloc = 0;
    statistics_.num_device_free = 0;
  }

  void reset_peak() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_each_figure(statistics_, [](auto& figure) { figure.reset_peak(); });
  }

 private:
  std::array<StatArray*, 3> counts() {
    return {&statistics_.allocation, &statistics_.segment, &statistics_.active};
  }
  std::array<StatArray*, 3> byte_counts() {
    return {&statistics_.allocated_bytes, &statistics_.reserved_bytes, &statistics_.active_bytes};
  }
  void report(void* address, int64_t bytes, c10::Device device) {
    c10::reportMemoryUsageToProfiler(address, bytes, aggregate(statistics_.allocated_bytes).current,
                                     aggregate(statistics_.reserved_bytes).current, device);
  }

  std::mutex mutex_;
  DeviceStats statistics_;
};

// Never destroyed: storages may be freed after the static objects of this library.
Account& account(c10::DeviceIndex index) {
  static auto* accounts = new std::array<Account, kMaxDevices>();
  return (*accounts)[index];
}

size_t round_up_to_alignment(size_t bytes) {
  return (bytes + kAlignment - 1) & ~(kAlignment - 1);
}

void free_block(void* data) {
  if (data == nullptr) return;
  Header* header = static_cast<Header*>(data) - 1;
  account(header->device)
      .record_free(data, header->requested_bytes, header->block_bytes, {kFoo, header->device});
  std::free(header);
}

void free_adopted(void* context) {
  const std::unique_ptr<AdoptedMemory> memory(static_cast<AdoptedMemory*>(context));
  account(memory->device)
      .record_free(context, memory->bytes, memory->bytes, {kFoo, memory->device});
}

void* allocate_block(size_t bytes, c10::DeviceIndex index) {
  const size_t block_bytes = round_up_to_alignment(bytes);
  void* block = nullptr;
  const bool overflows = block_bytes < bytes || block_bytes + sizeof(Header) < block_bytes;
  if (overflows || posix_memalign(&block, kAlignment, sizeof(Header) + block_bytes) != 0) {
    const size_t allocated = account(index).record_out_of_memory();
    TORCH_CHECK_WITH(OutOfMemoryError, false, "foo out of memory: cannot allocate ", bytes,
                     " bytes on device foo:", int{index}, " beside the ", allocated,
                     " bytes allocated there");
  }
  auto* header = new (block) Header{bytes, block_bytes, index};
  void* data = header + 1;
  account(index).record_allocation(data, bytes, block_bytes, {kFoo, index});
  return data;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kFoo, current_device());
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    void* data = allocate_block(bytes, device.index());
    return {data, data, &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  bool initialized() override { return true; }

  // Nothing is cached: a block goes back to the system when it is freed.
  void emptyCache(c10::MempoolId_t) override {}

  // Every operator is done when it returns, so no stream can still use a freed block.
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    check_device_index(index);
    return account(index).statistics();
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    check_device_index(index);
    account(index).reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    check_device_index(index);
    account(index).reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    check_device_index(index);
    const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return {static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page_bytes,
            static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes};
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

c10::DataPtr adopt(c10::Storage host, c10::Device device) {
  void* data = host.mutable_data();
  if (data == nullptr) return {nullptr, nullptr, &free_block, device};
  const size_t bytes = host.nbytes();
  auto* memory = new AdoptedMemory{std::move(host), bytes, device.index()};
  account(device.index()).record_allocation(memory, bytes, bytes, device);
  return {data, memory, &free_adopted, device};
}

bool is_own_memory(const c10::DataPtr& memory) {
  return memory.get_deleter() == &free_block;
}

}  // namespace foo::device
