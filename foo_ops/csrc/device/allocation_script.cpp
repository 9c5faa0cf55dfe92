#include "device/allocation_script.h"

#include <algorithm>
#include <utility>

#include "device/ownership.h"

namespace foo::device {
namespace {

thread_local RecordedAllocations* recorded = nullptr;
thread_local RepeatedAllocations* repeated = nullptr;

}  // namespace

RecordedAllocations::RecordedAllocations() : previous_(std::exchange(recorded, this)) {}

RecordedAllocations::~RecordedAllocations() {
  recorded = previous_;
  for (const ScriptedAllocation& each : script_) free_block(each.memory);
}

AllocationScript RecordedAllocations::take() {
  return std::exchange(script_, {});
}

RepeatedAllocations::RepeatedAllocations(const AllocationScript& script)
    : previous_(std::exchange(repeated, this)), next_(script.begin()), end_(script.end()) {}

RepeatedAllocations::~RepeatedAllocations() {
  repeated = previous_;
}

void* scripted_memory(size_t bytes) {
  if (repeated == nullptr) [[likely]]
    return nullptr;
  const auto found =
      std::find_if(repeated->next_, repeated->end_,
                   [&](const ScriptedAllocation& allocation) { return allocation.bytes == bytes; });
  if (found == repeated->end_) return nullptr;
  repeated->next_ = std::next(found);
  if (found->memory != nullptr) add_block_owner(found->memory);
  return found->memory;
}

void note_allocation(size_t bytes, void* memory) {
  if (recorded == nullptr) [[likely]]
    return;
  add_block_owner(memory);
  recorded->script_.push_back({bytes, memory});
}

}  // namespace foo::device
