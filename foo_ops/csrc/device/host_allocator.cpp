#include "device/host_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "device/device.h"
#include "device/heap.h"
#include "device/ownership.h"
#include "launch/memory.h"

namespace foo::device {
namespace {

// Guard bytes on each side; equal to the alignment of CPU memory.
constexpr size_t kGuardBytes = 64;
// Not zero, and unlikely in numbers that programs write.
constexpr unsigned char kGuard = 0xa7;

struct Guarded {
  c10::DataPtr whole;
  size_t bytes;
};

std::atomic<bool> is_guarding = false;
std::atomic<size_t> guarded_count = 0;

std::mutex mutex;
std::vector<Damage> damages;

std::unordered_map<void*, Guarded>& guarded() {
  // Never destroyed: tensors outlive static objects.
  static auto* allocations = new std::unordered_map<void*, Guarded>();
  return *allocations;
}

void write_guards(void* memory, size_t bytes) {
  auto* const begin = static_cast<unsigned char*>(memory);
  std::memset(begin - kGuardBytes, kGuard, kGuardBytes);
  std::memset(begin + bytes, kGuard, kGuardBytes);
}

void inspect(void* memory, size_t bytes) {
  const auto* const begin = static_cast<const unsigned char*>(memory);
  const auto is_written = [](unsigned char byte) { return byte != kGuard; };
  const auto* before = std::find_if(begin - kGuardBytes, begin, is_written);
  const auto* end = begin + bytes;
  const auto* after = std::find_if(end, end + kGuardBytes, is_written);
  const bool is_before = before != begin;
  if (!is_before && after == end + kGuardBytes) return;
  damages.emplace_back(reinterpret_cast<uintptr_t>(memory), bytes,
                       (is_before ? before : after) - begin);
}

void free_pointer(void* memory) {
  free_guarded(memory);
}

}  // namespace

void guard_memory() {
  const std::lock_guard lock(mutex);
  // A tensor whose guards were damaged may still live; report it only once.
  for (const auto& [memory, allocation] : guarded()) write_guards(memory, allocation.bytes);
  is_guarding = true;
}

std::vector<Damage> end_guarded_memory() {
  is_guarding = false;
  const std::lock_guard lock(mutex);
  for (const auto& [memory, allocation] : guarded()) inspect(memory, allocation.bytes);
  return std::exchange(damages, {});
}

bool guards_memory() {
  return is_guarding.load(std::memory_order_relaxed);
}

c10::DataPtr allocate_guarded(c10::Allocator& allocator, size_t bytes) {
  c10::DataPtr whole = allocator.allocate(bytes + 2 * kGuardBytes);
  void* const memory = static_cast<unsigned char*>(whole.get()) + kGuardBytes;
  write_guards(memory, bytes);
  const std::lock_guard lock(mutex);
  guarded().emplace(memory, Guarded{std::move(whole), bytes});
  ++guarded_count;
  return {memory, memory, &free_pointer, c10::Device(c10::kCPU)};
}

bool free_guarded(void* memory) {
  if (guarded_count.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(mutex);
  const auto allocation = guarded().find(memory);
  if (allocation == guarded().end()) return false;
  if (guards_memory()) inspect(memory, allocation->second.bytes);
  guarded().erase(allocation);
  --guarded_count;
  return true;
}

namespace {

// Device for the results of CPU kernels that this thread runs for foo.
thread_local c10::DeviceIndex target_of_host_tensors = kNoDevice;

// torch's own CPU allocator, which ours wraps.
c10::Allocator* host_allocator = nullptr;

// oneDNN allocates raw memory and may free it at any later time.
void free_raw(void* data) {
  if (device_of_address(data).has_value()) {
    free_block(data);
  } else if (!free_small_result(data) && !free_guarded(data)) {
    host_allocator->raw_deallocate(data);
  }
}

// Returns nothing for sizes between small and large ones, which torch's allocator serves.
c10::DataPtr memory_of_result(size_t bytes) {
  if (bytes > 0 && bytes <= kSmallResult) return allocate_small_result(bytes);
  return bytes >= kLargeResult ? allocate_result(bytes) : c10::DataPtr();
}

// Replaces the CPU allocator; allocates foo memory while a thread requests that.
class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (C10_LIKELY(target_of_host_tensors == kNoDevice)) {
      // Empty tensors have no memory.
      const bool is_guarded = guards_memory() && bytes > 0;
      if (C10_UNLIKELY(is_guarded)) return allocate_guarded(*host_allocator, bytes);
      if (NewResults::lives()) {
        if (c10::DataPtr memory = memory_of_result(bytes)) return memory;
      }
      return host_allocator->allocate(bytes);
    }
    return allocate_on(target_of_host_tensors, bytes, c10::Device(c10::kCPU));
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }

  bool is_simple_data_ptr(const c10::DataPtr& memory) const override { return is_unshared(memory); }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    const DeviceAccess access;
    default_copy_data(destination, source, bytes);
  }
};

const bool allocator_registered = [] {
  host_allocator = c10::GetCPUAllocator();
  // Never destroyed: torch keeps the pointer. A higher priority than the default's replaces it.
  c10::SetCPUAllocator(new HostAllocator(), 1);
  return true;
}();

}  // namespace

HostTensorsInDeviceMemory::HostTensorsInDeviceMemory(c10::DeviceIndex index)
    : previous_(std::exchange(target_of_host_tensors, index)) {}

HostTensorsInDeviceMemory::~HostTensorsInDeviceMemory() {
  target_of_host_tensors = previous_;
}

}  // namespace foo::device
