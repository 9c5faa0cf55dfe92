// Storages of device foo, as torch makes them where it does not name a class: torch.UntypedStorage,
// deserialization, empty tensors.
#pragma once

#include <c10/core/Storage.h>

namespace foo::device {

// The memory is of `device`; the storage grows on that device.
c10::Storage make_storage(c10::DataPtr memory, size_t bytes);

}  // namespace foo::device
