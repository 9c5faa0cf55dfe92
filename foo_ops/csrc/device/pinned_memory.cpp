#include "device/pinned_memory.h"

#include <c10/core/impl/alloc_cpu.h>

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

void free_pinned(void* data) {
  if (data == nullptr) return;
  {
    const std::lock_guard<std::mutex> lock(blocks().mutex);
    blocks().end_of.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}

class PinnedMemoryAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::kCPU);
    void* data = c10::alloc_cpu(bytes);
    if (data != nullptr) {
      const std::lock_guard<std::mutex> lock(blocks().mutex);
      const auto* start = static_cast<const char*>(data);
      blocks().end_of[start] = start + bytes;
    }
    return {data, data, &free_pinned, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

}  // namespace

c10::Allocator& pinned_memory_allocator() {
  static auto* allocator = new PinnedMemoryAllocator();
  return *allocator;
}

bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(blocks().mutex);
  const auto* position = static_cast<const char*>(address);
  auto after = blocks().end_of.upper_bound(position);
  return after != blocks().end_of.begin() && position < (--after)->second;
}

}  // namespace foo::device
