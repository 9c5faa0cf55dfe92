// Tensors over memory that they do not own: an operator of a graph finds by its address what it
// reads and writes, as a kernel on a GPU does.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <utility>

namespace foo::graphs {

// A tensor like a dense one of foo, and over the same bytes.
at::Tensor borrow(const at::Tensor& tensor, const c10::Storage& storage);
c10::Storage borrow_storage(const c10::Storage& storage);

// Borrows tensors so that those over one memory have one storage: kernels find out by it whether
// tensors overlap.
class Borrower {
 public:
  at::Tensor borrow(const at::Tensor& tensor);

 private:
  std::map<std::pair<const void*, size_t>, c10::Storage> storages_;
};

}  // namespace foo::graphs
