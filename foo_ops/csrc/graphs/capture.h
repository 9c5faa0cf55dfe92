// A running capture, which records the operators on its streams as a list of steps, each with
// everything that it needs to run again.

#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/device_memory.h"
#include "device/ownership.h"
#include "launch/fork_mutex.h"

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

// A block of memory that graphs keep, since they write to it at each replay.
class KeptMemory {
 public:
  // Takes over one ownership of the block.
  explicit KeptMemory(void* memory);
  KeptMemory(KeptMemory&& other) noexcept;
  KeptMemory& operator=(KeptMemory&&) = delete;
  ~KeptMemory();

  // Also keeps memory of another graph, such as the results of a forward pass that a backward pass
  // reads.
  static std::optional<KeptMemory> of_other_graph(void* memory);

 private:
  void* memory_;
};

// Memory that a graph uses in place: its owner, and the address of its bytes.
struct Input {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* data;
  std::string user;
};

// Result of a capture.
struct Recording {
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<Input> inputs;
  std::vector<KeptMemory> memory;
};

// Operators run while they are captured, since the shapes of results are not known earlier. At the
// end, their changes to memory from before the capture, and to the state of random generators, are
// undone, so that a capture has no effect, as on a GPU.
class Capture {
 public:
  Capture(c10::Stream stream, device::PoolId pool);

  void record(const c10::OperatorHandle& op, torch::jit::Stack* stack,
              c10::function_ref<void()> run);
  // For steps that are not operators: first borrow each tensor, then add the step.
  at::Tensor borrow(const std::string& name, const at::Tensor& tensor, bool is_written);
  void add(std::unique_ptr<Step> step);
  // Marks the capture as failed, and raises.
  [[noreturn]] void fail(const std::string& operator_name, const std::string& reason);

  // Undoes the changes. Raises afterwards if the capture has failed.
  Recording end();

  c10::Stream stream() const { return stream_; }
  device::PoolId pool() const { return pool_; }

 private:
  struct Saved {
    c10::Storage storage;
    const void* data;
    std::unique_ptr<char[]> bytes;
  };

  void refuse_synchronization(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);
  torch::jit::Stack borrow(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);
  at::Tensor borrow(const std::string& operator_name, const at::Tensor& tensor);
  at::Tensor host_tensor(const std::string& operator_name, const at::Tensor& tensor);
  at::Tensor outcome(const std::string& operator_name, const at::Tensor& tensor);
  bool is_own(const void* data) const { return own_memory_.count(data) > 0; }
  void save(const at::Tensor& tensor);
  void save(at::Generator generator);
  void save_what_changes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);
  void keep(OperatorStep& step, device::AllocationScript allocations,
            const std::vector<at::Tensor>& outcome);
  void restore();

  ForkMutex mutex_;
  c10::Stream stream_;
  device::PoolId pool_;
  Recording recording_;
  Borrower borrower_;
  std::set<const void*> own_memory_;
  std::set<const c10::StorageImpl*> known_inputs_;
  std::set<const c10::StorageImpl*> own_host_storages_;
  std::map<const void*, Saved> saved_;
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  std::optional<std::string> failure_;
};

// Formats a refusal the same way everywhere.
std::string refusal(const std::string& operator_name, const std::string& reason);

}  // namespace foo::graphs
