// What a graph consists of, each with all that it needs to run again.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "device/ownership.h"

namespace foo::graphs {

// Tensors over memory that they do not own: an operator of a graph finds by its address what it
// reads and writes, as a kernel on a GPU does.

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

// What a graph consists of, each with all that it needs to run again.

class Step {
 public:
  virtual ~Step() = default;

  // Runs in the current stream, with its results where they were.
  virtual void replay() const = 0;
  virtual std::string describe() const = 0;
};

class OperatorStep final : public Step {
 public:
  // What a call is given. Tensors of foo are borrowed.
  OperatorStep(const c10::OperatorHandle& op, torch::jit::Stack arguments);

  // What it left: the tensors among its results and, where they got other memory or another size,
  // among its arguments. Undefined where there is nothing to compare.
  void set_outcome(std::vector<at::Tensor> results, std::vector<at::Tensor> changed);
  void set_allocations(device::AllocationScript allocations);

  void replay() const override;
  // The operator, and the shapes of the tensors that it takes.
  std::string describe() const override;

 private:
  c10::OperatorHandle op_;
  torch::jit::Stack arguments_;
  std::vector<at::Tensor> results_;
  std::vector<at::Tensor> changed_;
  device::AllocationScript allocations_;
  c10::DeviceIndex device_;
  bool grad_mode_;
};

// The arguments that an operator writes to, in their order.
std::vector<at::Tensor> written_tensors(const c10::OperatorHandle& op,
                                        c10::ArrayRef<c10::IValue> arguments);
std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values);

}  // namespace foo::graphs
