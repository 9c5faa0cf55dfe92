// What an operator of a graph allocates, so that it gets the same memory each time it runs.
#pragma once

#include <c10/core/Device.h>

#include <vector>

namespace foo::device {

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

}  // namespace foo::device
