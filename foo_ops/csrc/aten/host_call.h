// The CPU side of one operator call on device foo.
//
// Foo memory is host memory, so a CPU kernel can work on it where it lies: each foo argument
// becomes a CPU tensor over the same bytes (a host alias), and what the kernel did to sizes and
// storages is written back afterwards. No byte is copied either way.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include "aten/host_aliases.h"
#include "aten/layouts.h"
#include "device/guard.h"
#include "device/host_allocator.h"

namespace foo::aten {

class HostCall {
 public:
  // Storages that the kernel grows belong to `device`, and so do new tensors unless the call names
  // another one.
  explicit HostCall(c10::Device device) : HostCall(device, device) {}
  HostCall(c10::Device device, c10::Device result_device);

  // The device of foo that takes part: that of the arguments, or else that of new tensors.
  c10::Device device() const { return device_guard_.current_device(); }

  // The host alias of a foo tensor. One storage has one alias per call: kernels find out by the
  // storage whether tensors overlap. Tensors of the CPU pass unchanged.
  at::Tensor to_host(const at::Tensor& tensor);

  // After the kernel: gives the foo arguments the storages, sizes and strides that it has changed.
  void write_back();

  // The foo tensor for a result: the argument itself, a view of it, or a new tensor.
  at::Tensor to_foo(const at::Tensor& host);

 private:
  // Where the elements of a host alias lay before the kernel. Another thread, or the kernel itself,
  // may meanwhile change the foo tensor, so that a comparison with that tells nothing.
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
  // Autograd has run, and a call on foo does not want autocast for the CPU.
  c10::impl::ExcludeDispatchKeyGuard below_autograd_;
  HostAliases<c10::Storage> storages_;
  HostAliases<at::Tensor> tensors_;
  // There is one for each pair of tensors; for those that are more than dense nothing is known.
  c10::SmallVector<Layout, 4> layouts_;
  // The arguments that are on the CPU, each its own alias.
  HostAliases<c10::Storage> host_storages_;
};

// A tensor like `source` in everything but the memory and the device.
at::Tensor with_storage(const at::Tensor& source, c10::Storage storage, c10::DispatchKey backend);

// The foo tensor over the storage that a host alias stands for; none for any other CPU tensor.
std::optional<at::Tensor> foo_tensor_over(const at::Tensor& host);

}  // namespace foo::aten
