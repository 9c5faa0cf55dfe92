#include "device/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/COWDeleter.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>

#include "device/device.h"
#include "device/heap.h"
#include "device/process.h"
#include "launch/fork_mutex.h"

namespace foo::device {
namespace {

using c10::CachingAllocator::format_size;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingDeviceAllocator::SegmentInfo;

// A huge page of the processor. Segments are aligned to it.
constexpr size_t kHugePage = size_t{2} << 20;

// Larger blocks have segments of their own, so that small ones do not cut them up.
constexpr size_t kLargestSmallBlock = size_t{1} << 20;
constexpr size_t kSmallSegment = kHugePage;
constexpr size_t kLargeSegment = 10 * kHugePage;
constexpr size_t kSmallestSmallRest = kAlignment;
constexpr size_t kSmallestLargeRest = kLargestSmallBlock;

// Beyond it, sums of sizes and headers could overflow.
constexpr size_t kLargestRequest = size_t{1} << 62;

static_assert(kBlockHeaderBytes == sizeof(Block));

struct AdoptedMemory {
  c10::Storage host;
  size_t bytes;
  c10::DeviceIndex device;
  std::atomic<uint32_t> owners = 1;
};

// Whether that was the last owner. A single one needs no atomic change: nobody can join it.
bool release_owner(std::atomic<uint32_t>& owners) {
  return owners.load(std::memory_order_acquire) == 1 ||
         owners.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

void add_owner(std::atomic<uint32_t>& owners) {
  owners.fetch_add(1, std::memory_order_relaxed);
}

size_t physical_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// What a program can have without swapping. Most of it may hold copies of files, which the system
// gives up when memory is needed, so that the free pages alone can be a hundredth of it.
size_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    size_t kilobytes = 0;
    if (words >> name >> kilobytes && name == "MemAvailable:") return kilobytes * 1024;
  }
  return static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) *
         static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Aligned memory from the system, or null. Transparent huge pages take fewer faults to touch.
char* map_memory(size_t bytes) {
  void* mapped = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(mapped);
  const size_t before =
      round_up(reinterpret_cast<uintptr_t>(begin), kHugePage) - reinterpret_cast<uintptr_t>(begin);
  char* aligned = begin + before;
  if (before > 0) munmap(begin, before);
  if (before < kHugePage) munmap(aligned + bytes, kHugePage - before);
  madvise(aligned, bytes, MADV_HUGEPAGE);
  return aligned;
}

// Which segments lie where, over all devices.
class SegmentMap {
 public:
  void add(const char* begin, size_t bytes, c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    segments_[begin] = {begin + bytes, device};
  }
  void remove(const char* begin) {
    const std::lock_guard lock(mutex_);
    segments_.erase(begin);
  }
  std::optional<c10::DeviceIndex> find(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto* position = static_cast<const char*>(address);
    auto after = segments_.upper_bound(position);
    if (after == segments_.begin()) return std::nullopt;
    const auto& [end, device] = std::prev(after)->second;
    return position < end ? std::optional(device) : std::nullopt;
  }

 private:
  ForkMutex mutex_;
  std::map<const char*, std::pair<const char*, c10::DeviceIndex>> segments_;
};

// Never destroyed, here and below: storages may be freed after the static objects of this library.
SegmentMap& segment_map() {
  static auto* map = new SegmentMap();
  return *map;
}

// The figures of one pool and of all, changed together.
class PoolStat {
 public:
  PoolStat(StatArray& stat, StatType pool) : stat_(stat), pool_(static_cast<size_t>(pool)) {}
  void increase(size_t amount) {
    stat_[kAll].increase(amount);
    stat_[pool_].increase(amount);
  }
  void decrease(size_t amount) {
    stat_[kAll].decrease(amount);
    stat_[pool_].decrease(amount);
  }
  void change(int64_t amount) { amount >= 0 ? increase(amount) : decrease(-amount); }

 private:
  static constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);
  StatArray& stat_;
  size_t pool_;
};

template <typename Function>
void for_each_figure(DeviceStats& statistics, Function function) {
  for (StatArray* statistic :
       {&statistics.allocation, &statistics.segment, &statistics.active, &statistics.inactive_split,
        &statistics.allocated_bytes, &statistics.reserved_bytes, &statistics.active_bytes,
        &statistics.inactive_split_bytes, &statistics.requested_bytes}) {
    for (Stat& figure : *statistic) function(figure);
  }
}

int64_t current_of(const StatArray& statistic) {
  return statistic[static_cast<size_t>(StatType::AGGREGATE)].current;
}

class DeviceMemory {
 public:
  void set_index(c10::DeviceIndex index) { index_ = index; }

  void* allocate(size_t bytes) {
    const size_t rounded = round_up(std::min(bytes, kLargestRequest), kAlignment);
    Pool& pool = rounded <= kLargestSmallBlock ? small_ : large_;
    Block* block = nullptr;
    Totals totals;
    {
      const std::lock_guard lock(mutex_);
      block = take(pool, rounded);
      if (block != nullptr) {
        block->requested_bytes = bytes;
        block->owners.store(1, std::memory_order_relaxed);
        count_allocation(pool, *block);
        totals = current_totals();
      }
    }
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, out_of_memory(bytes));
    report(block->memory(), static_cast<int64_t>(rounded), totals);
    return block->memory();
  }

  void free(Block* block) {
    void* memory = block->memory();
    const size_t rounded = round_up(block->requested_bytes, kAlignment);
    Totals totals;
    {
      const std::lock_guard lock(mutex_);
      Pool& pool = pool_of(*block);
      count_free(pool, *block);
      pool.heap.give_back(block);
      count_splits(pool);
      totals = current_totals();
    }
    report(memory, -static_cast<int64_t>(rounded), totals);
  }

  void count_adopted(AdoptedMemory* memory, int64_t sign) {
    Totals totals;
    {
      const std::lock_guard lock(mutex_);
      Pool& pool = memory->bytes <= kLargestSmallBlock ? small_ : large_;
      for (StatArray* count :
           {&statistics_.allocation, &statistics_.active, &statistics_.segment}) {
        PoolStat(*count, pool.type).change(sign);
      }
      for (StatArray* bytes : {&statistics_.allocated_bytes, &statistics_.active_bytes,
                               &statistics_.requested_bytes, &statistics_.reserved_bytes}) {
        PoolStat(*bytes, pool.type).change(sign * static_cast<int64_t>(memory->bytes));
      }
      totals = current_totals();
    }
    report(memory, sign * static_cast<int64_t>(memory->bytes), totals);
  }

  void empty_cache() {
    const std::lock_guard lock(mutex_);
    release_unused_segments();
  }

  DeviceStats statistics() {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

  void reset_accumulated() {
    const std::lock_guard lock(mutex_);
    for_each_figure(statistics_, [](Stat& figure) { figure.reset_accumulated(); });
    statistics_.num_alloc_retries = 0;
    statistics_.num_ooms = 0;
    statistics_.num_device_alloc = 0;
    statistics_.num_device_free = 0;
  }

  void reset_peak() {
    const std::lock_guard lock(mutex_);
    for_each_figure(statistics_, [](Stat& figure) { figure.reset_peak(); });
  }

  std::pair<size_t, size_t> free_and_total() {
    const size_t available = available_memory();
    const std::lock_guard lock(mutex_);
    const size_t allowed = allowed_bytes();
    const size_t reserved = reserved_bytes();
    const size_t left = reserved < allowed ? allowed - reserved : 0;
    return {std::min(left, available), total_memory()};
  }

  void set_fraction(double fraction) {
    const std::lock_guard lock(mutex_);
    fraction_ = fraction;
  }

  double fraction() {
    const std::lock_guard lock(mutex_);
    return fraction_;
  }

  void append_snapshot(std::vector<SegmentInfo>& segments) {
    const std::lock_guard lock(mutex_);
    for (Pool* pool : {&small_, &large_}) {
      for (Segment* each = pool->heap.first_segment(); each != nullptr; each = each->next) {
        segments.push_back(describe(*each, pool->type == StatType::LARGE_POOL));
      }
    }
  }

 private:
  struct Pool {
    Heap heap;
    StatType type;
    size_t segment_bytes;
    // The last figures of the heap that went into the statistics.
    SplitFigures counted;
  };

  // What torch's profiler wants to know of the device after each change.
  struct Totals {
    int64_t allocated = 0;
    int64_t reserved = 0;
  };

  Pool& pool_of(const Block& block) {
    return block.segment->heap == &small_.heap ? small_ : large_;
  }

  size_t total_memory() const {
    static const size_t physical = physical_memory();
    return memory_limit().value_or(physical);
  }

  size_t allowed_bytes() const {
    return static_cast<size_t>(fraction_ * static_cast<double>(total_memory()));
  }

  size_t reserved_bytes() const {
    return static_cast<size_t>(current_of(statistics_.reserved_bytes));
  }

  Totals current_totals() const {
    return {current_of(statistics_.allocated_bytes), current_of(statistics_.reserved_bytes)};
  }

  void report(void* address, int64_t bytes, const Totals& totals) const {
    c10::reportMemoryUsageToProfiler(address, bytes, totals.allocated, totals.reserved,
                                     {kFoo, index_});
  }

  // From the free blocks, else from the system, else from the system after all that is cached
  // went back to it.
  Block* take(Pool& pool, size_t bytes) {
    Block* block = pool.heap.take(bytes);
    if (block == nullptr && reserve(pool, bytes)) block = pool.heap.take(bytes);
    if (block == nullptr) {
      ++statistics_.num_alloc_retries;
      release_unused_segments();
      if (reserve(pool, bytes)) block = pool.heap.take(bytes);
    }
    count_splits(pool);
    if (block == nullptr) ++statistics_.num_ooms;
    return block;
  }

  // A segment of the pool's usual size, or where the limit forbids it, one that just suffices.
  bool reserve(Pool& pool, size_t bytes) {
    const size_t needed = round_up(bytes + sizeof(Block), kHugePage);
    return reserve_segment(pool, std::max(needed, pool.segment_bytes)) ||
           (needed < pool.segment_bytes && reserve_segment(pool, needed));
  }

  bool reserve_segment(Pool& pool, size_t bytes) {
    if (reserved_bytes() + bytes > allowed_bytes()) return false;
    char* begin = map_memory(bytes);
    if (begin == nullptr) return false;
    pool.heap.add(begin, bytes, index_);
    segment_map().add(begin, bytes, index_);
    PoolStat(statistics_.segment, pool.type).increase(1);
    PoolStat(statistics_.reserved_bytes, pool.type).increase(bytes);
    ++statistics_.num_device_alloc;
    return true;
  }

  void release_unused_segments() {
    for (Pool* pool : {&small_, &large_}) {
      while (Segment* segment = pool->heap.remove_unused_segment()) {
        segment_map().remove(segment->begin);
        munmap(segment->begin, segment->bytes);
        PoolStat(statistics_.segment, pool->type).decrease(1);
        PoolStat(statistics_.reserved_bytes, pool->type).decrease(segment->bytes);
        ++statistics_.num_device_free;
        delete segment;
      }
    }
  }

  void count_allocation(Pool& pool, const Block& block) {
    PoolStat(statistics_.allocation, pool.type).increase(1);
    PoolStat(statistics_.active, pool.type).increase(1);
    PoolStat(statistics_.allocated_bytes, pool.type)
        .increase(round_up(block.requested_bytes, kAlignment));
    PoolStat(statistics_.active_bytes, pool.type).increase(block.bytes);
    PoolStat(statistics_.requested_bytes, pool.type).increase(block.requested_bytes);
  }

  void count_free(Pool& pool, const Block& block) {
    PoolStat(statistics_.allocation, pool.type).decrease(1);
    PoolStat(statistics_.active, pool.type).decrease(1);
    PoolStat(statistics_.allocated_bytes, pool.type)
        .decrease(round_up(block.requested_bytes, kAlignment));
    PoolStat(statistics_.active_bytes, pool.type).decrease(block.bytes);
    PoolStat(statistics_.requested_bytes, pool.type).decrease(block.requested_bytes);
  }

  void count_splits(Pool& pool) {
    const SplitFigures& now = pool.heap.split_figures();
    PoolStat(statistics_.inactive_split, pool.type).change(now.blocks - pool.counted.blocks);
    PoolStat(statistics_.inactive_split_bytes, pool.type).change(now.bytes - pool.counted.bytes);
    pool.counted = now;
  }

  std::string out_of_memory(size_t bytes) {
    const auto [free_bytes, total] = free_and_total();
    const std::lock_guard lock(mutex_);
    const Totals totals = current_totals();
    const std::string limit =
        fraction_ < 1 ? c10::str(" This process may use ", format_size(allowed_bytes()), ".") : "";
    return c10::str(
        "foo out of memory. Tried to allocate ", format_size(bytes), ". Device foo:", int{index_},
        " has a total capacity of ", format_size(total), " of which ", format_size(free_bytes),
        " is free.", limit, " ", format_size(totals.allocated), " is allocated, and ",
        format_size(totals.reserved - totals.allocated), " is reserved but not allocated.");
  }

  SegmentInfo describe(const Segment& segment, bool is_large) const {
    SegmentInfo info;
    info.device = index_;
    info.address = reinterpret_cast<size_t>(segment.begin);
    info.total_size = segment.bytes;
    info.is_large = is_large;
    for (Block* block = segment.first_block(); block != nullptr; block = block->next()) {
      BlockInfo each;
      each.size = block->bytes;
      each.requested_size = block->is_free ? 0 : block->requested_bytes;
      each.allocated = each.active = !block->is_free;
      info.requested_size += each.requested_size;
      info.allocated_size += round_up(each.requested_size, kAlignment);
      info.active_size += block->is_free ? 0 : block->bytes;
      info.blocks.push_back(std::move(each));
    }
    return info;
  }

  ForkMutex mutex_;
  c10::DeviceIndex index_ = 0;
  double fraction_ = 1;
  DeviceStats statistics_;
  Pool small_{Heap(kSmallestSmallRest), StatType::SMALL_POOL, kSmallSegment, {}};
  Pool large_{Heap(kSmallestLargeRest), StatType::LARGE_POOL, kLargeSegment, {}};
};

DeviceMemory& memory_of(c10::DeviceIndex index) {
  static auto* devices = [] {
    // Their mutexes are held while that of the map is taken.
    segment_map();
    auto* memories = new std::array<DeviceMemory, kMaxDevices>();
    for (c10::DeviceIndex each = 0; each < kMaxDevices; ++each) (*memories)[each].set_index(each);
    return memories;
  }();
  return (*devices)[index];
}

void free_block(void* data) {
  // The memory goes with the process, whose figures are those of its parent.
  if (data == nullptr || is_in_bad_fork()) return;
  Block* block = Block::of(data);
  if (release_owner(block->owners)) memory_of(block->segment->device).free(block);
}

void free_adopted(void* context) {
  auto* adopted = static_cast<AdoptedMemory*>(context);
  if (!release_owner(adopted->owners)) return;
  const std::unique_ptr<AdoptedMemory> memory(adopted);
  if (!is_in_bad_fork()) memory_of(memory->device).count_adopted(memory.get(), -1);
}

void release_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

// Memory that storages share must not become copy-on-write for one of them alone.
bool is_unshared(const c10::DataPtr& memory) {
  if (memory.get() != memory.get_context()) return false;
  // An empty tensor has no block.
  return memory.get() == nullptr || memory.get_deleter() != &free_block ||
         Block::of(memory.get())->owners.load(std::memory_order_acquire) == 1;
}

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes, c10::Device label) {
  initialize();
  void* data = bytes == 0 ? nullptr : memory_of(index).allocate(bytes);
  return {data, data, &free_block, label};
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex index = current_device();
    return allocate_on(index, bytes, {kFoo, index});
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  bool is_simple_data_ptr(const c10::DataPtr& memory) const override { return is_unshared(memory); }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  bool initialized() override { return is_initialized(); }

  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      memory_of(index).empty_cache();
    }
  }

  // Every operator is done when it returns, so no stream can still use a freed block.
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

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

// Where the results of CPU kernels that this thread runs for foo are to lie.
thread_local c10::DeviceIndex target_of_host_tensors = kNoDevice;

// torch's own allocator of the CPU, under ours.
c10::Allocator* host_allocator = nullptr;

// oneDNN allocates raw memory and may free it at any later time.
void free_raw(void* data) {
  if (device_of_address(data).has_value()) {
    free_block(data);
  } else {
    host_allocator->raw_deallocate(data);
  }
}

// The allocator of the CPU, and in its place one of foo while a thread asks for it.
class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (C10_LIKELY(target_of_host_tensors == kNoDevice)) return host_allocator->allocate(bytes);
    return allocate_on(target_of_host_tensors, bytes, c10::Device(c10::kCPU));
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }

  bool is_simple_data_ptr(const c10::DataPtr& memory) const override { return is_unshared(memory); }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

const bool registered = [] {
  host_allocator = c10::GetCPUAllocator();
  // Never destroyed, as torch keeps the pointer. A priority above the default's replaces it.
  c10::SetCPUAllocator(new HostAllocator(), 1);
  return true;
}();

}  // namespace

c10::DeviceAllocator& allocator() {
  return instance();
}

c10::DataPtr adopt(c10::Storage host, c10::Device device) {
  void* data = host.mutable_data();
  if (data == nullptr) return {nullptr, nullptr, &free_block, device};
  const size_t bytes = host.nbytes();
  // Whoever keeps the storage, too, must not move it from under this one. Tensor.numpy does the
  // same.
  host.unsafeGetStorageImpl()->set_resizable(false);
  auto* memory = new AdoptedMemory{std::move(host), bytes, device.index()};
  memory_of(device.index()).count_adopted(memory, +1);
  return {data, memory, &free_adopted, device};
}

bool is_own_memory(const c10::DataPtr& memory) {
  return memory.get_deleter() == &free_block || memory.get_deleter() == &free_adopted;
}

c10::DataPtr share(const c10::Storage& storage, c10::Device device) {
  const c10::DataPtr& memory = storage.data_ptr();
  void* data = memory.get();
  if (data == nullptr) return {nullptr, nullptr, &free_block, device};
  const c10::DeleterFnPtr deleter = memory.get_deleter();
  if (C10_LIKELY(deleter == &free_block)) {
    add_owner(Block::of(data)->owners);
    return {data, data, deleter, device};
  }
  void* context = memory.get_context();
  if (deleter == &free_adopted) {
    add_owner(static_cast<AdoptedMemory*>(context)->owners);
    return {data, context, deleter, device};
  }
  if (deleter == &c10::impl::cow::cow_deleter) {
    static_cast<c10::impl::cow::COWDeleterContext*>(context)->increment_refcount();
    return {data, context, deleter, device};
  }
  auto* owner = storage.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(owner);
  return {data, owner, &release_storage, device};
}

std::optional<c10::DeviceIndex> device_of_address(const void* address) {
  return segment_map().find(address);
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

HostTensorsInDeviceMemory::HostTensorsInDeviceMemory(c10::DeviceIndex index)
    : previous_(std::exchange(target_of_host_tensors, index)) {}

HostTensorsInDeviceMemory::~HostTensorsInDeviceMemory() {
  target_of_host_tensors = previous_;
}

}  // namespace foo::device
