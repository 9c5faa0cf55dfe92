// Device memory as torch allocates it, and the storages that are made of it.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace foo::device {

// Storages of device foo, as torch makes them where it does not name a class: torch.UntypedStorage,
// deserialization, empty tensors.

// Version and number of a format.
using Format = std::pair<int64_t, int64_t>;

// What torch._utils.set_tensor_metadata takes, and files keep.
using Flags = std::unordered_map<std::string, bool>;

struct Metadata {
  std::optional<Format> format;
  Flags flags;

  bool is_empty() const { return !format.has_value() && flags.empty(); }
};

struct StorageImpl final : c10::StorageImpl {
  using c10::StorageImpl::StorageImpl;

  // All tensors over one memory bear the same.
  Metadata metadata;
};

// The memory is of `device`; the storage grows on that device.
c10::Storage make_storage(c10::DataPtr memory, size_t bytes);

// Gives a storage of foo other memory. c10 would first copy what it holds now, if that is to be
// copied on writing.
void set_memory(const c10::Storage& storage, c10::DataPtr memory, size_t bytes);

// Device memory: host memory that is kept for the next tensor, counted and limited per device.

c10::DeviceAllocator& allocator();

// How much of its total memory a device may reserve, from 0 to 1.
void set_memory_fraction(double fraction, c10::DeviceIndex index);
double memory_fraction(c10::DeviceIndex index);

// Before the memory of each block in a segment.
inline constexpr size_t kBlockHeaderBytes = 64;

std::vector<c10::CachingDeviceAllocator::SegmentInfo> memory_snapshot();

}  // namespace foo::device
