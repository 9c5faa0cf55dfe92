// The storage of a host alias: storage of the CPU in the memory of one of foo.
#pragma once

#include <c10/core/Storage.h>

#include "device/memory_protection.h"

namespace foo::aten {

// Shares the memory, so that the foo storage may move while a kernel, a collective or a cache still
// uses the alias. It grows in memory of the same device.
class HostStorage final : public c10::StorageImpl {
 public:
  explicit HostStorage(c10::Storage foo);

  const c10::Storage& foo() const { return foo_; }

  // Whether a kernel gave it other memory, or another size, than it began with.
  bool has_moved() const { return data() != first_data_ || nbytes() != first_bytes_; }

  // c10 calls this when only weak references are left.
  void release_resources() override;

 private:
  c10::Storage foo_;
  const void* first_data_;
  // Collectives and caches of the CPU use it outside of kernels.
  device::HeldOpen held_open_;
  size_t first_bytes_;
};

// Null for any other storage.
const HostStorage* as_host_storage(const c10::Storage& storage);

// Makes memory for a storage of foo with the result of a kernel. Whatever the kernel keeps of it, a
// table or a workspace, stays its own: the two share the memory.
c10::DataPtr memory_for_foo(const c10::Storage& host, c10::Device device);

// Gives the foo storage the memory that its alias has now.
void move_to_memory_of(const c10::Storage& host, const c10::Storage& foo);

// The storage of foo for that of an alias: the one that the alias was made for, or a new one over
// the same memory if the first lies elsewhere by now.
c10::Storage foo_storage_of(const c10::Storage& host, const HostStorage& alias);

}  // namespace foo::aten
