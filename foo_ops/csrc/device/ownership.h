// Owners of a device's memory, and the allocations of a graph, which get the same memory at each
// replay.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <vector>

namespace foo::device {

// An allocation of a graph's operator, which gets the same memory at each replay.
struct ScriptedAllocation {
  size_t bytes;
  // Null if any memory will do.
  void* memory;
};

using AllocationScript = std::vector<ScriptedAllocation>;

// While an instance lives, this thread's allocations are recorded and their memory is kept.
class RecordedAllocations {
 public:
  RecordedAllocations();
  ~RecordedAllocations();
  RecordedAllocations(const RecordedAllocations&) = delete;
  RecordedAllocations& operator=(const RecordedAllocations&) = delete;

  // Returns all allocations, in order. The caller must free their memory.
  AllocationScript take();

 private:
  friend void note_allocation(size_t bytes, void* memory);

  RecordedAllocations* previous_;
  AllocationScript script_;
};

// While an instance lives, this thread's allocations get the memory of a script: each the next one
// of its size. Other allocations are served as usual.
class RepeatedAllocations {
 public:
  explicit RepeatedAllocations(const AllocationScript& script);
  ~RepeatedAllocations();
  RepeatedAllocations(const RepeatedAllocations&) = delete;
  RepeatedAllocations& operator=(const RepeatedAllocations&) = delete;

 private:
  friend void* scripted_memory(size_t bytes);

  RepeatedAllocations* previous_;
  AllocationScript::const_iterator next_;
  AllocationScript::const_iterator end_;
};

// For the allocator. The memory gets one more owner, as if it were new.
void* scripted_memory(size_t bytes);
void note_allocation(size_t bytes, void* memory);

// Turns the memory of a CPU storage into memory of `device`, too: no byte moves, and the device's
// statistics count it until it is freed. The storage can no longer be resized.
c10::DataPtr adopt(c10::Storage host, c10::Device device);

// Whether the memory comes from allocator().allocate or adopt, so that share can use it for a
// storage on any device.
bool is_own_memory(const c10::DataPtr& memory);

// Shares the memory of a storage with another one: it is freed with the last of them, also if one
// moves elsewhere. Copy-on-write memory stays so. Memory from neither allocate nor adopt lives as
// long as `storage`.
c10::DataPtr share(const c10::Storage& storage, c10::Device device);

// Whether memory has a single owner. Shared memory must not become copy-on-write for only one of
// its storages.
bool is_unshared(const c10::DataPtr& memory);

// Whether CPU code may continue to use the memory outside of kernels.
bool may_be_used_by_host(const void* data);

// Allocates memory of a device, with `label` as the pointer's device.
c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes, c10::Device label);

// Adds an owner of such memory.
void add_block_owner(void* data);

// Removes an owner, and frees the memory if it was the last.
void free_block(void* data);

}  // namespace foo::device
