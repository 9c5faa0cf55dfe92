// Steps of a graph, each with everything that it needs to run again.

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

// Returns a tensor over the same bytes as a dense foo tensor, without owning them: an operator of a
// graph finds its data by address, as a kernel on a GPU does.
at::Tensor borrow(const at::Tensor& tensor, const c10::Storage& storage);
c10::Storage borrow_storage(const c10::Storage& storage);

// Borrows tensors so that those over the same memory share a storage: kernels compare storages to
// find overlaps.
class Borrower {
 public:
  at::Tensor borrow(const at::Tensor& tensor);

 private:
  std::map<std::pair<const void*, size_t>, c10::Storage> storages_;
};

class Step {
 public:
  virtual ~Step() = default;

  // Runs on the current stream and writes the results to the same memory.
  virtual void replay() const = 0;
  virtual std::string describe() const = 0;
};

class OperatorStep final : public Step {
 public:
  // `arguments` are those of the call. Tensors of foo are borrowed.
  OperatorStep(const c10::OperatorHandle& op, torch::jit::Stack arguments);

  // Sets the tensors among the results and, if their memory or size changed, among the arguments.
  // Undefined ones are not compared.
  void set_outcome(std::vector<at::Tensor> results, std::vector<at::Tensor> changed);
  void set_allocations(device::AllocationScript allocations);

  void replay() const override;
  // Returns the operator and the shapes of its tensor arguments.
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

// Returns the arguments that an operator writes, in order.
std::vector<at::Tensor> written_tensors(const c10::OperatorHandle& op,
                                        c10::ArrayRef<c10::IValue> arguments);
std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values);

}  // namespace foo::graphs
