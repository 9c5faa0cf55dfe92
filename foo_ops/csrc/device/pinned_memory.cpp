#include "device/pinned_memory.h"

// torch's header uses the distance that keeps two threads' data apart; it differs by processor.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Winterference-size"
#endif
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <functional>
#include <map>
#include <mutex>

namespace foo::device {
namespace {

struct Blocks {
  std::mutex mutex;
  // The end of each block by its start.
  std::map<const char*, const char*, std::less<>> end_of;
};

// Never destroyed: tensors may be freed after the static objects of this library.
Blocks& blocks() {
  static auto* instance = new Blocks();
  return *instance;
}

// Every operator is done when it returns, so no event ever has to be waited for.
struct NoEvent {};

using HostBlock = at::HostBlock<c10::Stream>;

class CachingImpl final : public at::CachingHostAllocatorImpl<c10::Stream, NoEvent, HostBlock> {
 public:
  // The base class would note the stream, and keep the block back until it is done.
  bool record_event(void* memory, void*, c10::Stream) override { return is_pinned(memory); }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }

 private:
  void allocate_host_memory(size_t bytes, void** memory) override {
    *memory = c10::alloc_cpu(bytes);
    const auto* begin = static_cast<const char*>(*memory);
    const std::lock_guard<std::mutex> lock(blocks().mutex);
    blocks().end_of[begin] = begin + bytes;
  }

  void free_block(HostBlock* block) override {
    {
      const std::lock_guard<std::mutex> lock(blocks().mutex);
      blocks().end_of.erase(static_cast<const char*>(block->ptr_));
    }
    c10::free_cpu(block->ptr_);
  }
};

void free_pinned(void* context);

using PinnedMemoryAllocator = at::CachingHostAllocatorInterface<CachingImpl, &free_pinned>;

PinnedMemoryAllocator& instance() {
  static auto* allocator = new PinnedMemoryAllocator();
  return *allocator;
}

void free_pinned(void* context) {
  instance().free(context);
}

REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, &instance())

}  // namespace

c10::Allocator& pinned_memory_allocator() {
  return instance();
}

bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(blocks().mutex);
  const auto* position = static_cast<const char*>(address);
  auto after = blocks().end_of.upper_bound(position);
  return after != blocks().end_of.begin() && position < (--after)->second;
}

}  // namespace foo::device
