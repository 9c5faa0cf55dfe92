#include "graphs/kept_memory.h"

#include <mutex>
#include <unordered_map>
#include <utility>

#include "device/ownership.h"
#include "launch/fork_mutex.h"

namespace foo::graphs {
namespace {

struct Known {
  ForkMutex mutex;
  // By address, how often it is kept.
  std::unordered_map<void*, int> blocks;
};

// It is never destroyed: graphs may be after the static objects of this library.
Known& known() {
  static auto* instance = new Known();
  return *instance;
}

}  // namespace

KeptMemory::KeptMemory(void* memory) : memory_(memory) {
  const std::lock_guard lock(known().mutex);
  ++known().blocks[memory];
}

KeptMemory::KeptMemory(KeptMemory&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)) {}

KeptMemory::~KeptMemory() {
  if (memory_ == nullptr) return;
  {
    const std::lock_guard lock(known().mutex);
    const auto found = known().blocks.find(memory_);
    if (--found->second == 0) known().blocks.erase(found);
  }
  device::free_block(memory_);
}

std::optional<KeptMemory> KeptMemory::of_other_graph(void* memory) {
  {
    const std::lock_guard lock(known().mutex);
    if (known().blocks.count(memory) == 0) return std::nullopt;
  }
  device::add_block_owner(memory);
  return KeptMemory(memory);
}

}  // namespace foo::graphs
