#include "device/ownership.h"

#include <c10/core/impl/COWDeleter.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "device/device.h"
#include "device/device_memory.h"
#include "device/heap.h"
#include "device/observer.h"
#include "launch/memory.h"

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

namespace {

struct AdoptedMemory {
  c10::Storage host;
  size_t bytes;
  c10::DeviceIndex device;
  std::atomic<uint32_t> owners = 1;
};

// Removes an owner; returns whether it was the last. A single owner needs no atomic change, since
// nobody can join it.
bool release_owner(std::atomic<uint32_t>& owners) {
  return owners.load(std::memory_order_acquire) == 1 ||
         owners.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

void add_owner(std::atomic<uint32_t>& owners) {
  owners.fetch_add(1, std::memory_order_relaxed);
}

void free_adopted(void* context) {
  auto* adopted = static_cast<AdoptedMemory*>(context);
  if (!release_owner(adopted->owners)) return;
  const std::unique_ptr<AdoptedMemory> memory(adopted);
  observe([&](Observer& observer) { observer.freed(memory->host.data()); });
  if (!is_in_bad_fork()) memory_of(memory->device).count_adopted(memory.get(), memory->bytes, -1);
}

void release_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

}  // namespace

void add_block_owner(void* data) {
  const DeviceAccess access(data);
  add_owner(Block::of(data)->owners);
}

void free_block(void* data) {
  // In a forked child the memory goes with the process, and the statistics are the parent's.
  if (data == nullptr || is_in_bad_fork()) return;
  const DeviceAccess access(data);
  Block* block = Block::of(data);
  if (!release_owner(block->owners)) return;
  observe([&](Observer& observer) { observer.freed(data); });
  memory_of(block->segment->device).free(block);
}

bool may_be_used_by_host(const void* data) {
  const DeviceAccess access(data);
  return Block::of(const_cast<void*>(data))->may_be_used_by_host();
}

bool is_unshared(const c10::DataPtr& memory) {
  if (memory.get() != memory.get_context()) return false;
  // An empty tensor has no block.
  if (memory.get() == nullptr || memory.get_deleter() != &free_block) return true;
  const DeviceAccess access(memory.get());
  return Block::of(memory.get())->owners.load(std::memory_order_acquire) == 1;
}

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes, c10::Device label) {
  initialize();
  if (bytes == 0) return {nullptr, nullptr, &free_block, label};
  if (void* again = scripted_memory(bytes)) {
    observe([&](Observer& observer) { observer.allocated_again(again); });
    return {again, again, &free_block, label};
  }
  void* data = memory_of(index).allocate(bytes, label.is_cpu());
  c10::DataPtr memory(data, data, &free_block, label);
  note_allocation(bytes, data);
  observe([&](Observer& observer) {
    label.is_cpu() ? observer.allocated_by_host_kernel(data, bytes, index)
                   : observer.allocated(data, bytes, index);
  });
  return memory;
}

c10::DataPtr adopt(c10::Storage host, c10::Device device) {
  void* data = host.mutable_data();
  if (data == nullptr) return {nullptr, nullptr, &free_block, device};
  const size_t bytes = host.nbytes();
  // Other owners of the storage must not move it now. Tensor.numpy does the same.
  host.unsafeGetStorageImpl()->set_resizable(false);
  auto* memory = new AdoptedMemory{std::move(host), bytes, device.index()};
  memory_of(device.index()).count_adopted(memory, bytes, +1);
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
    const DeviceAccess access(data);
    Block* block = Block::of(data);
    add_owner(block->owners);
    // Written only once, since other threads may share the block, too.
    if (block->is_of_host && device.type() == kFoo) block->is_of_host = false;
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

}  // namespace foo::device
