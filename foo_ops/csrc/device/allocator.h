// Device memory as torch allocates it, and the storages made of it.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace foo::device {

// Storages of device foo, as torch makes them if it does not name a class: torch.UntypedStorage,
// deserialization, empty tensors.

// Version and number of a format.
using Format = std::pair<int64_t, int64_t>;

// Flags of torch._utils.set_tensor_metadata, which files keep.
using Flags = std::unordered_map<std::string, bool>;

struct Metadata {
  std::optional<Format> format;
  Flags flags;

  bool is_empty() const { return !format.has_value() && flags.empty(); }
};

struct StorageImpl final : c10::StorageImpl {
  using c10::StorageImpl::StorageImpl;

  // Shared by all tensors over the same memory.
  Metadata metadata;
};

// Makes a storage of memory on `device`, where it also grows.
c10::Storage make_storage(c10::DataPtr memory, size_t bytes);

// Replaces the memory of a foo storage. c10 would first copy the old memory if that is
// copy-on-write.
void set_memory(const c10::Storage& storage, c10::DataPtr memory, size_t bytes);

// Allocator of device memory: host memory that is cached for the next tensor, counted and limited
// per device.
c10::DeviceAllocator& allocator();

// Fraction of its total memory that a device may reserve, from 0 to 1.
void set_memory_fraction(double fraction, c10::DeviceIndex index);
double memory_fraction(c10::DeviceIndex index);

// Header in front of the memory of each block in a segment.
inline constexpr size_t kBlockHeaderBytes = 64;

std::vector<c10::CachingDeviceAllocator::SegmentInfo> memory_snapshot();

}  // namespace foo::device
