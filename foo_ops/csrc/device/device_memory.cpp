#include "device/device_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/allocator.h"
#include "device/device.h"
#include "device/heap.h"
#include "device/protection.h"
#include "device/stream.h"
#include "launch/fork_mutex.h"
#include "launch/memory.h"

namespace foo::device {

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t physical_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes();
}

size_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    size_t kilobytes = 0;
    if (words >> name >> kilobytes && name == "MemAvailable:") return kilobytes * 1024;
  }
  return static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page_bytes();
}

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

namespace {

using c10::CachingAllocator::format_size;
using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::SegmentInfo;

// Larger blocks have separate segments, so that small ones do not fragment theirs.
constexpr size_t kLargestSmallBlock = size_t{1} << 20;
constexpr size_t kSmallSegment = kHugePage;
constexpr size_t kLargeSegment = 10 * kHugePage;
constexpr size_t kSmallestSmallRest = kAlignment;
constexpr size_t kSmallestLargeRest = kLargestSmallBlock;
constexpr size_t kNeverSplit = size_t{1} << 62;

// Above this, sums of sizes and headers could overflow.
constexpr size_t kLargestRequest = size_t{1} << 62;

static_assert(kBlockHeaderBytes == sizeof(Block));

}  // namespace

DeviceMemory::Pools::Pools(PoolId its_id, PoolOptions its_options)
    : id(its_id),
      options(its_options),
      small(StatType::SMALL_POOL, kSmallSegment,
            options.no_split ? kNeverSplit : kSmallestSmallRest),
      large(StatType::LARGE_POOL, kLargeSegment,
            options.no_split ? kNeverSplit : kSmallestLargeRest) {}

DeviceMemory::Pool& DeviceMemory::Pools::pool_for(size_t bytes) {
  return bytes <= kLargestSmallBlock ? small : large;
}

bool DeviceMemory::Pools::has_segments() const {
  return small.first_segment() != nullptr || large.first_segment() != nullptr;
}

template <typename Function>
void DeviceMemory::for_each_pools(Function function) {
  function(common_);
  for (auto& [id, pools] : private_) function(*pools);
}

void* DeviceMemory::allocate(size_t bytes, bool is_for_host) {
  const DeviceAccess access;
  const size_t rounded = round_up(std::min(bytes, kLargestRequest), kAlignment);
  const PoolId id = chosen_pool(index_);
  Block* block = nullptr;
  Totals totals;
  {
    const std::lock_guard lock(mutex_);
    Pools& pools = id == kCommonPool ? common_ : *private_.at(id);
    block = take(pools.pool_for(rounded), rounded);
    if (block != nullptr) {
      block->requested_bytes = bytes;
      block->is_of_host = is_for_host;
      block->owners.store(1, std::memory_order_relaxed);
      count_block(pool_of(*block), *block, 1);
      totals = current_totals();
    }
  }
  TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, out_of_memory(bytes));
  report(block->memory(), static_cast<int64_t>(rounded), totals);
  return block->memory();
}

void DeviceMemory::free(Block* block) {
  void* memory = block->memory();
  const size_t rounded = round_up(block->requested_bytes, kAlignment);
  Totals totals;
  {
    const std::lock_guard lock(mutex_);
    Pool& pool = pool_of(*block);
    count_block(pool, *block, -1);
    pool.give_back(block);
    count_splits(pool);
    totals = current_totals();
  }
  report(memory, -static_cast<int64_t>(rounded), totals);
}

void DeviceMemory::count_adopted(void* address, size_t bytes, int64_t sign) {
  Totals totals;
  {
    const std::lock_guard lock(mutex_);
    const Pool& pool = common_.pool_for(bytes);
    for (StatArray* count : {&statistics_.allocation, &statistics_.active, &statistics_.segment}) {
      PoolStat(*count, pool.type).change(sign);
    }
    for (StatArray* figure : {&statistics_.allocated_bytes, &statistics_.active_bytes,
                              &statistics_.requested_bytes, &statistics_.reserved_bytes}) {
      PoolStat(*figure, pool.type).change(sign * static_cast<int64_t>(bytes));
    }
    totals = current_totals();
  }
  report(address, sign * static_cast<int64_t>(bytes), totals);
}

void DeviceMemory::empty_cache() {
  const DeviceAccess access;
  const std::lock_guard lock(mutex_);
  release_unused_segments();
}

void DeviceMemory::empty_cache_of(PoolId id) {
  const DeviceAccess access;
  const std::lock_guard lock(mutex_);
  const auto found = private_.find(id);
  if (found != private_.end()) release_unused_segments(*found->second);
}

void DeviceMemory::add_user(PoolId id, PoolOptions options) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Pools>& pools = private_[id];
  if (pools == nullptr) pools = std::make_unique<Pools>(id, options);
  ++pools->users;
}

void DeviceMemory::remove_user(PoolId id) {
  const DeviceAccess access;
  const std::lock_guard lock(mutex_);
  if (--private_.at(id)->users == 0) release_unused_segments();
}

int64_t DeviceMemory::count_users(PoolId id) {
  const std::lock_guard lock(mutex_);
  const auto found = private_.find(id);
  return found == private_.end() ? 0 : found->second->users;
}

DeviceStats DeviceMemory::statistics() {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void DeviceMemory::reset_accumulated() {
  const std::lock_guard lock(mutex_);
  for_each_figure(statistics_, [](Stat& figure) { figure.reset_accumulated(); });
  statistics_.num_alloc_retries = 0;
  statistics_.num_ooms = 0;
  statistics_.num_device_alloc = 0;
  statistics_.num_device_free = 0;
}

void DeviceMemory::reset_peak() {
  const std::lock_guard lock(mutex_);
  for_each_figure(statistics_, [](Stat& figure) { figure.reset_peak(); });
}

std::pair<size_t, size_t> DeviceMemory::free_and_total() {
  const size_t available = available_memory();
  const std::lock_guard lock(mutex_);
  const size_t allowed = allowed_bytes();
  const size_t reserved = reserved_bytes();
  const size_t left = reserved < allowed ? allowed - reserved : 0;
  return {std::min(left, available), total_memory()};
}

void DeviceMemory::set_fraction(double fraction) {
  const std::lock_guard lock(mutex_);
  fraction_ = fraction;
}

double DeviceMemory::fraction() {
  const std::lock_guard lock(mutex_);
  return fraction_;
}

void DeviceMemory::append_snapshot(std::vector<SegmentInfo>& segments) {
  const DeviceAccess access;
  const std::lock_guard lock(mutex_);
  for_each_pools([&](const Pools& pools) {
    for (const Pool* pool : {&pools.small, &pools.large}) {
      for (Segment* each = pool->first_segment(); each != nullptr; each = each->next) {
        segments.push_back(describe(*each, *pool, pools.id));
      }
    }
  });
}

std::vector<const void*> DeviceMemory::used_by_host() {
  std::vector<const void*> memory;
  const DeviceAccess access;
  const std::lock_guard lock(mutex_);
  for_each_pools([&](const Pools& pools) {
    for (const Pool* pool : {&pools.small, &pools.large}) {
      for (Segment* each = pool->first_segment(); each != nullptr; each = each->next) {
        for (Block* block = each->first_block(); block != nullptr; block = block->next()) {
          if (!block->is_free && block->may_be_used_by_host()) memory.push_back(block->memory());
        }
      }
    }
  });
  return memory;
}

DeviceMemory::Pool& DeviceMemory::pool_of(const Block& block) {
  return static_cast<Pool&>(*block.segment->heap);
}

size_t DeviceMemory::total_memory() const {
  static const size_t physical = physical_memory();
  return memory_limit().value_or(physical);
}

size_t DeviceMemory::allowed_bytes() const {
  return static_cast<size_t>(fraction_ * static_cast<double>(total_memory()));
}

size_t DeviceMemory::reserved_bytes() const {
  return static_cast<size_t>(current_of(statistics_.reserved_bytes));
}

DeviceMemory::Totals DeviceMemory::current_totals() const {
  return {current_of(statistics_.allocated_bytes), current_of(statistics_.reserved_bytes)};
}

void DeviceMemory::report(void* address, int64_t bytes, const Totals& totals) const {
  c10::reportMemoryUsageToProfiler(address, bytes, totals.allocated, totals.reserved,
                                   {kFoo, index_});
}

Block* DeviceMemory::take(Pool& pool, size_t bytes) {
  Block* block = pool.take(bytes);
  if (block == nullptr && reserve(pool, bytes)) block = pool.take(bytes);
  if (block == nullptr) {
    ++statistics_.num_alloc_retries;
    release_unused_segments();
    if (reserve(pool, bytes)) block = pool.take(bytes);
  }
  count_splits(pool);
  if (block == nullptr) block = take_from_others(pool, bytes);
  if (block == nullptr) ++statistics_.num_ooms;
  return block;
}

Block* DeviceMemory::take_from_others(const Pool& full, size_t bytes) {
  const bool is_common = &full == &common_.small || &full == &common_.large;
  if (!is_common) return nullptr;
  for (auto& [id, pools] : private_) {
    if (!pools->options.use_on_oom) continue;
    Pool& pool = pools->pool_for(bytes);
    Block* block = pool.take(bytes);
    count_splits(pool);
    if (block != nullptr) return block;
  }
  return nullptr;
}

bool DeviceMemory::reserve(Pool& pool, size_t bytes) {
  const size_t needed = round_up(bytes + sizeof(Block), kHugePage);
  return reserve_segment(pool, std::max(needed, pool.segment_bytes)) ||
         (needed < pool.segment_bytes && reserve_segment(pool, needed));
}

bool DeviceMemory::reserve_segment(Pool& pool, size_t bytes) {
  if (reserved_bytes() + bytes > allowed_bytes()) return false;
  char* begin = map_memory(bytes);
  if (begin == nullptr) return false;
  pool.add(begin, bytes, index_);
  segment_map().add(begin, bytes, index_);
  memory_protection().segment_added(begin, bytes);
  PoolStat(statistics_.segment, pool.type).increase(1);
  PoolStat(statistics_.reserved_bytes, pool.type).increase(bytes);
  ++statistics_.num_device_alloc;
  return true;
}

void DeviceMemory::release_unused_segments() {
  release_unused_segments(common_);
  for (auto each = private_.begin(); each != private_.end();) {
    Pools& pools = *each->second;
    if (pools.users == 0) release_unused_segments(pools);
    each = pools.users == 0 && !pools.has_segments() ? private_.erase(each) : std::next(each);
  }
}

void DeviceMemory::release_unused_segments(Pools& pools) {
  for (Pool* pool : {&pools.small, &pools.large}) {
    while (Segment* segment = pool->remove_unused_segment()) {
      segment_map().remove(segment->begin);
      memory_protection().segment_removed(segment->begin);
      munmap(segment->begin, segment->bytes);
      PoolStat(statistics_.segment, pool->type).decrease(1);
      PoolStat(statistics_.reserved_bytes, pool->type).decrease(segment->bytes);
      ++statistics_.num_device_free;
      delete segment;
    }
  }
}

void DeviceMemory::count_block(const Pool& pool, const Block& block, int64_t sign) {
  const auto change = [&](StatArray& figure, size_t amount) {
    PoolStat(figure, pool.type).change(sign * static_cast<int64_t>(amount));
  };
  change(statistics_.allocation, 1);
  change(statistics_.active, 1);
  change(statistics_.allocated_bytes, round_up(block.requested_bytes, kAlignment));
  change(statistics_.active_bytes, block.bytes);
  change(statistics_.requested_bytes, block.requested_bytes);
}

void DeviceMemory::count_splits(Pool& pool) {
  const SplitFigures& now = pool.split_figures();
  PoolStat(statistics_.inactive_split, pool.type).change(now.blocks - pool.counted.blocks);
  PoolStat(statistics_.inactive_split_bytes, pool.type).change(now.bytes - pool.counted.bytes);
  pool.counted = now;
}

std::string DeviceMemory::out_of_memory(size_t bytes) {
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

SegmentInfo DeviceMemory::describe(const Segment& segment, const Pool& pool, PoolId id) const {
  SegmentInfo info;
  info.device = index_;
  info.address = reinterpret_cast<size_t>(segment.begin);
  info.total_size = segment.bytes;
  info.is_large = pool.type == StatType::LARGE_POOL;
  info.owner_private_pool_id = id;
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

DeviceMemory& memory_of(c10::DeviceIndex index) {
  static auto* devices = [] {
    // Make these two first: their mutexes are locked while the devices' are held.
    segment_map();
    memory_protection();
    auto* memories = new std::array<DeviceMemory, kMaxDevices>();
    for (c10::DeviceIndex each = 0; each < kMaxDevices; ++each) (*memories)[each].set_index(each);
    return memories;
  }();
  return (*devices)[index];
}

namespace {

// Number of threads and streams with a pool of their own, usually 0.
std::atomic<int> choices = 0;

thread_local std::vector<std::pair<c10::DeviceIndex, PoolId>> pools_of_thread;

struct StreamPools {
  ForkMutex mutex;
  std::unordered_map<c10::Stream, PoolId> pools;
};

StreamPools& stream_pools() {
  static auto* instance = new StreamPools();
  return *instance;
}

}  // namespace

PoolId new_pool_id(bool is_for_capture) {
  static std::atomic<c10::CaptureId_t> next_of_capture = 1;
  static std::atomic<c10::CaptureId_t> next = 1;
  return is_for_capture ? PoolId(next_of_capture++, 0) : PoolId(0, next++);
}

void begin_pool(c10::DeviceIndex index, PoolId id) {
  pools_of_thread.emplace_back(index, id);
  choices.fetch_add(1, std::memory_order_relaxed);
}

void end_pool(c10::DeviceIndex index, PoolId id) {
  TORCH_CHECK(!pools_of_thread.empty() && pools_of_thread.back() == std::pair(index, id),
              "foo: the memory pool to end must be the last one that this thread has begun");
  pools_of_thread.pop_back();
  choices.fetch_sub(1, std::memory_order_relaxed);
}

void begin_pool(c10::Stream stream, PoolId id) {
  const std::lock_guard lock(stream_pools().mutex);
  stream_pools().pools[stream] = id;
  choices.fetch_add(1, std::memory_order_relaxed);
}

void end_pool(c10::Stream stream) {
  const std::lock_guard lock(stream_pools().mutex);
  stream_pools().pools.erase(stream);
  choices.fetch_sub(1, std::memory_order_relaxed);
}

PoolId chosen_pool(c10::DeviceIndex index) {
  if (choices.load(std::memory_order_relaxed) == 0) [[likely]]
    return kCommonPool;
  for (auto each = pools_of_thread.rbegin(); each != pools_of_thread.rend(); ++each) {
    if (each->first == index) return each->second;
  }
  const std::lock_guard lock(stream_pools().mutex);
  const auto found = stream_pools().pools.find(current_stream(index));
  return found == stream_pools().pools.end() ? kCommonPool : found->second;
}

}  // namespace foo::device
