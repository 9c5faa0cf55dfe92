#include "graphs/program.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "launch/memory.h"

namespace foo::graphs {

Constant::Constant(at::Tensor tensor)
    : tensor_(std::move(tensor)),
      memory_(tensor_.storage().data()),
      offset_(tensor_.storage_offset()),
      sizes_(tensor_.sizes()),
      strides_(tensor_.strides()),
      dtype_(tensor_.scalar_type()) {}

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

std::optional<std::vector<at::Tensor>> Program::run(int64_t position,
                                                    const std::vector<at::Tensor>& inputs) const {
  TORCH_CHECK_VALUE(inputs.size() == inputs_.size(), "program: inputs must be ", inputs_.size(),
                    " tensors, got ", inputs.size());
  // Recorded below autograd and autocast, as TorchDispatchMode sees calls.
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  const NewResults results;
  for (const auto& [index, constant] : constants_) {
    if (!constant.is_in_place()) return std::nullopt;
  }
  const std::unique_lock lock(preparation_mutex_, std::try_to_lock);
  if (lock.owns_lock()) return run_prepared(position, inputs);
  Registers registers = constants();
  write_inputs(inputs, registers);
  if (!execute_from(instructions_, 0, position, registers)) return std::nullopt;
  return outputs_of(registers);
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
    preparation = std::make_unique<Preparation>(instructions_, outputs_, constants());
  }
  write_inputs(inputs, preparation->registers());
  if (!preparation->run(position)) return std::nullopt;
  std::vector<at::Tensor> outputs = outputs_of(preparation->registers());
  preparation->forget();
  preparation_ = std::move(preparation);
  return outputs;
}

void Program::write_inputs(const std::vector<at::Tensor>& inputs, Registers& registers) const {
  for (size_t i = 0; i < inputs.size(); ++i) registers[inputs_[i]] = inputs[i];
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
