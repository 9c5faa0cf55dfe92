#include "device/memory_pools.h"

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "launch/fork_mutex.h"

namespace foo::device {
namespace {

// Number of threads and streams with a pool of their own, usually 0.
std::atomic<int> choices = 0;

thread_local std::vector<std::pair<c10::DeviceIndex, PoolId>> pools_of_thread;

struct StreamPools {
  ForkMutex mutex;
  std::unordered_map<c10::Stream, PoolId> pools;
};

StreamPools& stream_pools() {
  static auto* instance = new StreamPools();
  return *instance;
}

}  // namespace

PoolId new_pool_id(bool is_for_capture) {
  static std::atomic<c10::CaptureId_t> next_of_capture = 1;
  static std::atomic<c10::CaptureId_t> next = 1;
  return is_for_capture ? PoolId(next_of_capture++, 0) : PoolId(0, next++);
}

void begin_pool(c10::DeviceIndex index, PoolId id) {
  pools_of_thread.emplace_back(index, id);
  choices.fetch_add(1, std::memory_order_relaxed);
}

void end_pool(c10::DeviceIndex index, PoolId id) {
  TORCH_CHECK(!pools_of_thread.empty() && pools_of_thread.back() == std::pair(index, id),
              "foo: this thread does not use the memory pool that is to end, or began another "
              "one after it");
  pools_of_thread.pop_back();
  choices.fetch_sub(1, std::memory_order_relaxed);
}

void begin_pool(c10::Stream stream, PoolId id) {
  const std::lock_guard lock(stream_pools().mutex);
  stream_pools().pools[stream] = id;
  choices.fetch_add(1, std::memory_order_relaxed);
}

void end_pool(c10::Stream stream) {
  const std::lock_guard lock(stream_pools().mutex);
  stream_pools().pools.erase(stream);
  choices.fetch_sub(1, std::memory_order_relaxed);
}

PoolId chosen_pool(c10::DeviceIndex index) {
  if (choices.load(std::memory_order_relaxed) == 0) [[likely]]
    return kCommonPool;
  for (auto each = pools_of_thread.rbegin(); each != pools_of_thread.rend(); ++each) {
    if (each->first == index) return each->second;
  }
  const std::lock_guard lock(stream_pools().mutex);
  const auto found = stream_pools().pools.find(current_stream(index));
  return found == stream_pools().pools.end() ? kCommonPool : found->second;
}

}  // namespace foo::device
