#include "device/pinned_memory.h"

// torch's header uses std::hardware_destructive_interference_size, which differs by processor.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Winterference-size"
#endif
#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>

#include "device/device.h"
#include "device/device_memory.h"
#include "device/heap.h"
#include "device/observer.h"
#include "launch/fork_mutex.h"

namespace foo::device {
namespace {

struct Blocks {
  ForkMutex mutex;
  // End of each block, by its start.
  std::map<const char*, const char*, std::less<>> end_of;
};

// Never destroyed: tensors may be freed after the static objects of this library.
Blocks& blocks() {
  static auto* instance = new Blocks();
  return *instance;
}

// Every operator is done when it returns, so there is no event to wait for.
struct NoEvent {};

using HostBlock = at::HostBlock<c10::Stream>;

class CachingImpl final : public at::CachingHostAllocatorImpl<c10::Stream, NoEvent, HostBlock> {
 public:
  // The base class would record the stream, and keep the block until it is done.
  bool record_event(void* memory, void*, c10::Stream) override { return is_pinned(memory); }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }

 private:
  void allocate_host_memory(size_t bytes, void** memory) override {
    // Whole pages, as for pinned memory elsewhere, so that they can be protected.
    *memory = std::aligned_alloc(page_bytes(), round_up(bytes, page_bytes()));
    TORCH_CHECK_WITH(OutOfMemoryError, *memory != nullptr, "foo: cannot allocate ", bytes,
                     " bytes of pinned memory");
    const auto* begin = static_cast<const char*>(*memory);
    const std::lock_guard lock(blocks().mutex);
    blocks().end_of[begin] = begin + bytes;
  }

  void free_block(HostBlock* block) override {
    {
      const std::lock_guard lock(blocks().mutex);
      blocks().end_of.erase(static_cast<const char*>(block->ptr_));
    }
    std::free(block->ptr_);
  }
};

void free_pinned(void* context);

using CachingAllocator = at::CachingHostAllocatorInterface<CachingImpl, &free_pinned>;

class PinnedMemoryAllocator final : public CachingAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    initialize();
    c10::DataPtr memory = CachingAllocator::allocate(bytes);
    observe([&](Observer& observer) { observer.pinned(memory.get(), bytes); });
    return memory;
  }
};

PinnedMemoryAllocator& pinned_allocator() {
  static auto* allocator = new PinnedMemoryAllocator();
  return *allocator;
}

void free_pinned(void* context) {
  // In a forked child a lock of torch may never be released; the process frees the memory.
  if (is_in_bad_fork()) return;
  observe(
      [&](Observer& observer) { observer.unpinned(static_cast<const HostBlock*>(context)->ptr_); });
  pinned_allocator().free(context);
}

REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, &pinned_allocator())

void add_figures(const std::string& name, const c10::CachingAllocator::Stat& stat,
                 std::map<std::string, int64_t>& figures) {
  figures[name + ".current"] = stat.current;
  figures[name + ".peak"] = stat.peak;
  figures[name + ".allocated"] = stat.allocated;
  figures[name + ".freed"] = stat.freed;
}

}  // namespace

c10::Allocator& pinned_memory_allocator() {
  return pinned_allocator();
}

std::map<std::string, int64_t> pinned_memory_stats() {
  const at::HostStats stats = pinned_allocator().get_stats();
  std::map<std::string, int64_t> figures;
  add_figures("allocations", stats.allocations, figures);
  add_figures("allocated_bytes", stats.allocated_bytes, figures);
  add_figures("active_requests", stats.active_requests, figures);
  add_figures("active_bytes", stats.active_bytes, figures);
  figures["num_host_alloc"] = stats.num_host_alloc;
  figures["num_host_free"] = stats.num_host_free;
  return figures;
}

void reset_accumulated_pinned_memory_stats() {
  pinned_allocator().reset_accumulated_stats();
}

void reset_peak_pinned_memory_stats() {
  pinned_allocator().reset_peak_stats();
}

bool is_pinned(const void* address) {
  if (is_in_bad_fork()) return false;
  const std::lock_guard lock(blocks().mutex);
  const auto* position = static_cast<const char*>(address);
  auto after = blocks().end_of.upper_bound(position);
  return after != blocks().end_of.begin() && position < (--after)->second;
}

}  // namespace foo::device
