// A capture that is under way: what its streams are given becomes a list of operators.

#pragma once

#include <ATen/core/Generator.h>
#include <c10/util/FunctionRef.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/memory_pools.h"
#include "graphs/step.h"
#include "launch/fork_mutex.h"

namespace foo::graphs {

// Blocks of memory that graphs write to each time they are replayed, and so keep.

class KeptMemory {
 public:
  // Takes over one owner of the block.
  explicit KeptMemory(void* memory);
  KeptMemory(KeptMemory&& other) noexcept;
  KeptMemory& operator=(KeptMemory&&) = delete;
  ~KeptMemory();

  // What another graph keeps, such as the results of a forward pass that a backward pass reads, is
  // kept by this one, too.
  static std::optional<KeptMemory> of_other_graph(void* memory);

 private:
  void* memory_;
};

// A capture that is under way: what its streams are given becomes a list of operators.
//
// Operators run while they are captured, since the shapes of results are known no sooner. What they
// write into memory from before the capture, and the random numbers that they draw, are put back in
// the end, so that a capture leaves things as it found them, as it does on a GPU.

// Memory that a graph finds where it is: who owned it, and where its bytes were.
struct Input {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* data;
  std::string user;
};

// What a capture leaves.
struct Recording {
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<Input> inputs;
  std::vector<KeptMemory> memory;
};

class Capture {
 public:
  Capture(c10::Stream stream, device::PoolId pool);

  void record(const c10::OperatorHandle& op, torch::jit::Stack* stack,
              c10::function_ref<void()> run);
  // For what is no operator: first each of its tensors, then the step.
  at::Tensor borrow(const std::string& name, const at::Tensor& tensor, bool is_written);
  void add(std::unique_ptr<Step> step);
  // Notes that nothing of it can be replayed, and raises.
  [[noreturn]] void fail(const std::string& operator_name, const std::string& reason);

  // Puts back what was changed. Raises, afterwards, where the capture has failed.
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

// Makes a refusal read the same everywhere.
std::string refusal(const std::string& operator_name, const std::string& reason);

}  // namespace foo::graphs
