// `tensor.data = other` between the CPU and foo, and with it Module.to, which keeps its parameters:
// weights stay tied, and an optimizer that has them goes on. torch has a list of the devices
// between which that works, which foo is not on.

#include <torch/library.h>

#include "device/device.h"

namespace foo::aten {
namespace {

c10::DispatchKeySet as_on_cpu(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  if (tensor.device().type() != device::kFoo) return keys;
  return keys.remove_backend(c10::BackendComponent::PrivateUse1Bit) |
         c10::DispatchKeySet(c10::BackendComponent::CPUBit);
}

// One of the two is on foo.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  if (self.is_cpu()) {
    return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(as_on_cpu(from));
  }
  if (from.is_cpu()) {
    return from.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(as_on_cpu(self));
  }
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

}  // namespace foo::aten
