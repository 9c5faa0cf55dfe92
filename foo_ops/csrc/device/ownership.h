// Owners of a device's memory, and the allocations of a graph, which get the same each time.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <vector>

namespace foo::device {

// What an operator of a graph allocates, so that it gets the same memory each time it runs.

struct ScriptedAllocation {
  size_t bytes;
  // Null where the operator is to get whatever memory there is.
  void* memory;
};

using AllocationScript = std::vector<ScriptedAllocation>;

// While one lives, this thread's allocations are noted, and their memory is kept.
class RecordedAllocations {
 public:
  RecordedAllocations();
  ~RecordedAllocations();
  RecordedAllocations(const RecordedAllocations&) = delete;
  RecordedAllocations& operator=(const RecordedAllocations&) = delete;

  // All of them, in order. Who takes them frees their memory.
  AllocationScript take();

 private:
  friend void note_allocation(size_t bytes, void* memory);

  RecordedAllocations* previous_;
  AllocationScript script_;
};

// While one lives, this thread gets memory of a script: for each allocation that of the next one of
// its size. Others are served as ever.
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

// For the allocator. The memory has one owner more, as if it were new.
void* scripted_memory(size_t bytes);
void note_allocation(size_t bytes, void* memory);

// Owners of a device's memory: several storages may share it, and some of it came from the CPU.

// Makes memory of a storage of the CPU memory of `device` as well: no byte moves, and the
// statistics of the device count it until it is freed. The storage can no longer be resized.
c10::DataPtr adopt(c10::Storage host, c10::Device device);

// Whether the memory comes from allocator().allocate or adopt, so that share makes it that of a
// storage on any device.
bool is_own_memory(const c10::DataPtr& memory);

// Shares the memory of a storage with another one: it is freed with the last of them, also when one
// of them moves elsewhere. Memory that is copied on writing stays so. Memory that neither allocate
// nor adopt gave lives as long as `storage`.
c10::DataPtr share(const c10::Storage& storage, c10::Device device);

// Memory that storages share must not become copy-on-write for one of them alone.
bool is_unshared(const c10::DataPtr& memory);

// Whether code of the CPU may go on using such memory, outside of kernels.
bool may_be_used_by_host(const void* data);

// Memory of a device, in a pointer that says it is on `label`.
c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes, c10::Device label);

// One owner more of such memory.
void add_block_owner(void* data);

// Frees such memory when its last owner is gone.
void free_block(void* data);

}  // namespace foo::device
