// Private pools of device memory, and the threads and streams that allocate from them.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <functional>

namespace foo::device {

using PoolId = c10::MempoolId_t;

inline constexpr PoolId kCommonPool = {0, 0};

struct PoolOptions {
  // Whether the pool also serves requests for which the common pool has no memory.
  bool use_on_oom = false;
  // Whether each block has its own segment.
  bool no_split = false;
};

// Returns an id as torch numbers them: the first number is for pools that a capture makes for
// itself, the second for others.
PoolId new_pool_id(bool is_for_capture);

// Serves this thread's allocations on a device, or those with the stream as the current one, from
// the pool. The caller must be a user of the pool meanwhile.
void begin_pool(c10::DeviceIndex index, PoolId id);
// Ends the last pool that began; raises if that is another one.
void end_pool(c10::DeviceIndex index, PoolId id);

void begin_pool(c10::Stream stream, PoolId id);
void end_pool(c10::Stream stream);

// Returns the pool for an allocation of this thread.
PoolId chosen_pool(c10::DeviceIndex index);

}  // namespace foo::device
