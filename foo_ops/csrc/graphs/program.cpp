#include "graphs/program.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "launch/batch.h"
#include "launch/memory.h"

namespace foo::graphs {

Constant::Constant(at::Tensor tensor)
    : tensor_(std::move(tensor)),
      storage_(tensor_.storage().unsafeGetStorageImpl()),
      memory_(tensor_.storage().data()),
      offset_(tensor_.storage_offset()),
      sizes_(tensor_.sizes()),
      strides_(tensor_.strides()),
      dtype_(tensor_.scalar_type()) {}

void Constant::prefetch() const {
  prefetch_bytes(tensor_.unsafeGetTensorImpl(), sizeof(c10::TensorImpl));
  prefetch_bytes(storage_, sizeof(c10::StorageImpl));
}

bool Constant::is_in_place() const {
  return tensor_.storage().data() == memory_ && tensor_.storage_offset() == offset_ &&
         tensor_.sizes() == sizes_ && tensor_.strides() == strides_ &&
         tensor_.scalar_type() == dtype_;
}

Program::Program(int64_t register_count, std::vector<int64_t> inputs, std::vector<int64_t> outputs,
                 std::vector<std::pair<int64_t, at::Tensor>> constants,
                 std::vector<Instruction> instructions)
    : inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      instructions_(std::move(instructions)),
      register_count_(register_count) {
  for (auto& [index, tensor] : constants) constants_.emplace_back(index, Constant(tensor));
  complete(instructions_);
}

Program::Series::~Series() {
  if (lock_.owns_lock() && program_.preparation_ != nullptr) program_.preparation_->forget();
}

std::optional<std::vector<at::Tensor>> Program::Series::run(
    int64_t position, const std::vector<at::Tensor>& inputs) const {
  const std::vector<int64_t>& indices = program_.inputs_;
  TORCH_CHECK_VALUE(inputs.size() == indices.size(), "program: inputs must be ", indices.size(),
                    " tensors, got ", inputs.size());
  // Recorded below autograd and autocast, as TorchDispatchMode sees calls.
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  const NewResults results;
  // A model has hundreds, and its weights have pushed them out of the first caches.
  constexpr size_t kAhead = 6;
  const auto& constants = program_.constants_;
  for (size_t i = 0; i < constants.size(); ++i) {
    if (i + kAhead < constants.size()) constants[i + kAhead].second.prefetch();
    if (!constants[i].second.is_in_place()) return std::nullopt;
  }
  if (lock_.owns_lock()) return program_.run_prepared(position, inputs);
  Registers registers = program_.constants();
  for (size_t i = 0; i < inputs.size(); ++i) registers[indices[i]] = inputs[i];
  if (!execute_from(program_.instructions_, 0, position, registers)) return std::nullopt;
  return program_.outputs_of(registers);
}

size_t Program::lasting_calls() const {
  const std::lock_guard lock(preparation_mutex_);
  return preparation_ == nullptr ? 0 : preparation_->lasting_calls();
}

std::optional<std::vector<at::Tensor>> Program::run_prepared(
    int64_t position, const std::vector<at::Tensor>& inputs) const {
  // After an error there is none.
  std::unique_ptr<Preparation> preparation = std::move(preparation_);
  if (preparation == nullptr || !preparation->fits()) {
    preparation = std::make_unique<Preparation>(instructions_, inputs_, outputs_, constants());
  }
  if (!preparation->run(position, inputs)) return std::nullopt;
  std::vector<at::Tensor> outputs = outputs_of(preparation->registers());
  preparation->forget_results();
  preparation_ = std::move(preparation);
  return outputs;
}

std::vector<at::Tensor> Program::outputs_of(const Registers& registers) const {
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const int64_t index : outputs_) outputs.push_back(registers[index]);
  return outputs;
}

Registers Program::constants() const {
  Registers registers(register_count_);
  for (const auto& [index, constant] : constants_) registers[index] = constant.tensor();
  return registers;
}

}  // namespace foo::graphs
