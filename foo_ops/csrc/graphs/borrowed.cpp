#include "graphs/borrowed.h"

#include "aten/host_call.h"
#include "device/storage.h"

namespace foo::graphs {

at::Tensor borrow(const at::Tensor& tensor, const c10::Storage& storage) {
  at::Tensor result = aten::with_storage(tensor, storage, c10::DispatchKey::PrivateUse1);
  // Some kernels compute only then what the backward pass needs.
  if (tensor.requires_grad()) result.set_requires_grad(true);
  return result;
}

c10::Storage borrow_storage(const c10::Storage& storage) {
  return device::make_storage({const_cast<void*>(storage.data()), storage.device()},
                              storage.nbytes());
}

at::Tensor Borrower::borrow(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  // Empty ones that have nothing in common have the same address.
  if (storage.data() == nullptr) return graphs::borrow(tensor, borrow_storage(storage));
  c10::Storage& known = storages_[{storage.data(), storage.nbytes()}];
  if (!known) known = borrow_storage(storage);
  return graphs::borrow(tensor, known);
}

}  // namespace foo::graphs
