// The CPU side of one operator call on device foo: its host aliases and their storages.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
#include <optional>
#include <utility>

#include "aten/layouts.h"
#include "device/guard.h"
#include "device/host_allocator.h"
#include "device/protection.h"

namespace foo::aten {

// CPU storage of a host alias, over the memory of a foo storage. Shares the memory, so that the foo
// storage may move while a kernel, a collective or a cache still uses the alias. It grows in memory
// of the same device.
class HostStorage final : public c10::StorageImpl {
 public:
  explicit HostStorage(c10::Storage foo);

  const c10::Storage& foo() const { return foo_; }

  // Whether a kernel has changed the memory or the size.
  bool has_moved() const { return data() != first_data_ || nbytes() != first_bytes_; }

  // c10 calls this when only weak references are left.
  void release_resources() override;

 private:
  c10::Storage foo_;
  const void* first_data_;
  // Collectives and CPU caches use the memory outside of kernels.
  device::HeldOpen held_open_;
  size_t first_bytes_;
};

// Casts a storage, or returns null if it is not a host alias's.
const HostStorage* as_host_storage(const c10::Storage& storage);

// Makes memory for a foo storage that holds a kernel's result. The two share the memory, so that
// whatever the kernel keeps, a table or a workspace, stays its own.
c10::DataPtr memory_for_foo(const c10::Storage& host, c10::Device device);

// Moves the foo storage to the memory that its alias has now.
void move_to_memory_of(const c10::Storage& host, const c10::Storage& foo);

// Returns the foo storage of an alias: the one that the alias was made for, or a new one over the
// same memory if that has moved.
c10::Storage foo_storage_of(const c10::Storage& host, const HostStorage& alias);

inline bool is_same(const c10::Storage& one, const c10::Storage& other) {
  return one.is_alias_of(other);
}

inline bool is_same(const at::Tensor& one, const at::Tensor& other) {
  return one.is_same(other);
}

inline const void* identity(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl();
}

inline const void* identity(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl();
}

template <class Value>
class HostAliases {
 public:
  // Returns the other side of a pair, or null. The pointer is valid until the next add.
  const Value* host_of(const Value& foo) { return find(foo, &Pair::foo, &Pair::host, foo_index_); }
  const Value* foo_of(const Value& host) {
    return find(host, &Pair::host, &Pair::foo, host_index_);
  }

  void add(const Value& foo, const Value& host) { pairs_.push_back({foo, host}); }

  auto begin() const { return pairs_.begin(); }
  auto end() const { return pairs_.end(); }

 private:
  struct Pair {
    Value foo;
    Value host;
  };

  // Positions of the first pairs, by one of their sides.
  struct Index {
    ska::flat_hash_map<const void*, size_t> positions;
    size_t size = 0;
  };

  // From this many pairs on, look up by hash. Most calls have fewer tensors, and a walk costs less;
  // lists of thousands exist, too.
  static constexpr size_t kMany = 16;

  const Value* find(const Value& key, Value Pair::* side, Value Pair::* other,
                    std::unique_ptr<Index>& index) {
    if (pairs_.size() >= kMany) return find_by_index(key, side, other, index);
    for (const Pair& pair : pairs_) {
      if (is_same(pair.*side, key)) return &(pair.*other);
    }
    return nullptr;
  }

  const Value* find_by_index(const Value& key, Value Pair::* side, Value Pair::* other,
                             std::unique_ptr<Index>& index) {
    if (index == nullptr) index = std::make_unique<Index>();
    for (; index->size < pairs_.size(); ++index->size) {
      index->positions.emplace(identity(pairs_[index->size].*side), index->size);
    }
    const auto position = index->positions.find(identity(key));
    return position == index->positions.end() ? nullptr : &(pairs_[position->second].*other);
  }

  c10::SmallVector<Pair, 4> pairs_;
  std::unique_ptr<Index> foo_index_;
  std::unique_ptr<Index> host_index_;
};

// Foo memory is host memory, so a CPU kernel can use it directly: each foo argument becomes a CPU
// tensor over the same bytes (a host alias), and the kernel's changes to sizes and storages are
// written back afterwards. No byte is copied either way.
class HostCall {
 public:
  // Storages that the kernel grows belong to `device`, and so do new tensors unless the call names
  // another device.
  explicit HostCall(c10::Device device) : HostCall(device, device) {}
  HostCall(c10::Device device, c10::Device result_device);

  // Returns the foo device of the call: the arguments', or else that of new tensors.
  c10::Device device() const { return device_guard_.current_device(); }

  // Returns the host alias of a foo tensor. A storage has one alias per call, since kernels compare
  // storages to find overlaps. CPU tensors pass unchanged.
  at::Tensor to_host(const at::Tensor& tensor);

  // Call after the kernel: copies changed storages, sizes and strides to the foo arguments.
  void write_back();

  // Returns the foo tensor for a result: the argument itself, a view of it, or a new tensor.
  at::Tensor to_foo(const at::Tensor& host);

 private:
  // Memory layout of a host alias before the kernel. A comparison with the foo tensor would tell
  // nothing, since another thread, or the kernel itself, may change that tensor meanwhile.
  struct Layout {
    Layout() = default;
    explicit Layout(const at::Tensor& tensor);
    bool is_of(const at::Tensor& tensor) const;

    c10::impl::SizesAndStrides dimensions;
    const c10::StorageImpl* storage = nullptr;
    int64_t offset = 0;
  };

  c10::Storage storage_to_host(const c10::Storage& foo);
  c10::Storage storage_to_foo(const c10::Storage& host);
  at::Tensor part_to_foo(const at::Tensor& host);
  PartMap parts_to_host();
  PartMap parts_to_foo();
  void write_back(const at::Tensor& foo, const at::Tensor& host, const Layout& before);

  c10::Device result_device_;
  device::DeviceGuard device_guard_;
  device::HostTensorsInDeviceMemory host_tensors_in_device_memory_;
  // Autograd has run, and a call on foo must not be autocast for the CPU.
  c10::impl::ExcludeDispatchKeyGuard below_autograd_;
  HostAliases<c10::Storage> storages_;
  HostAliases<at::Tensor> tensors_;
  // One for each pair of tensors; empty for tensors that are not dense.
  c10::SmallVector<Layout, 4> layouts_;
  // Arguments on the CPU, each its own alias.
  HostAliases<c10::Storage> host_storages_;
};

// Returns a tensor that differs from `source` only in memory and device.
at::Tensor with_storage(const at::Tensor& source, c10::Storage storage, c10::DispatchKey backend);

// Returns the foo tensor of a host alias; nullopt for any other CPU tensor.
std::optional<at::Tensor> foo_tensor_over(const at::Tensor& host);

}  // namespace foo::aten
