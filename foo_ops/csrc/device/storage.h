// Storages of device foo, as torch makes them where it does not name a class: torch.UntypedStorage,
// deserialization, empty tensors.
#pragma once

#include <c10/core/Storage.h>

#include <optional>
#include <utility>

namespace foo::device {

// Version and number of a format.
using Format = std::pair<int64_t, int64_t>;

struct StorageImpl final : c10::StorageImpl {
  using c10::StorageImpl::StorageImpl;

  // The metadata of backend_meta.h: all tensors over one memory have one format.
  std::optional<Format> format;
};

// The memory is of `device`; the storage grows on that device.
c10::Storage make_storage(c10::DataPtr memory, size_t bytes);

// Gives a storage of foo other memory. c10 would first copy what it holds now, if that is to be
// copied on writing.
void set_memory(const c10::Storage& storage, c10::DataPtr memory, size_t bytes);

}  // namespace foo::device
