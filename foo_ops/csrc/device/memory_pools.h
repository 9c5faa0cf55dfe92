// Pools of device memory that are not for everyone, and who allocates from which.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <functional>

namespace foo::device {

using PoolId = c10::MempoolId_t;

inline constexpr PoolId kCommonPool = {0, 0};

struct PoolOptions {
  // Whether it serves those that the common pool has no memory for.
  bool use_on_oom = false;
  // Whether each block has a segment of its own.
  bool no_split = false;
};

// As torch counts them: the first number is that of a pool that a capture makes for itself, the
// second that of any other.
PoolId new_pool_id(bool is_for_capture);

// From here on this thread's allocations on a device, or those with the stream as the current one,
// come from the pool. The caller uses it as long.
void begin_pool(c10::DeviceIndex index, PoolId id);
// Ends the last that began; raises where that is another one.
void end_pool(c10::DeviceIndex index, PoolId id);

void begin_pool(c10::Stream stream, PoolId id);
void end_pool(c10::Stream stream);

// The pool for an allocation of this thread.
PoolId chosen_pool(c10::DeviceIndex index);

}  // namespace foo::device
