#include "ops/elementwise.h"

#include <ATen/TensorIterator.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "aten/operator_counts.h"

namespace foo {

namespace {

// TensorIterator's 2-d loop: data and strides (in bytes) stand in the order outputs, inputs; and
// the numbers among the arguments.
using ElementwiseFunction = void(char** data, const int64_t* strides, int64_t size0, int64_t size1,
                                 const int64_t* scalars);

using Tensors = c10::SmallVector<at::Tensor, 4>;

at::ScalarType common_type(at::TensorList inputs) {
  return inputs.size() == 1 ? inputs.front().scalar_type() : at::native::result_type(inputs);
}

// Allocates outputs that are not defined, of one dtype.
at::TensorIterator make_iterator(at::ScalarType result_type, at::TensorList outputs,
                                 at::ScalarType common, at::TensorList inputs) {
  at::TensorIteratorConfig config;
  bool is_given = false;
  for (const at::Tensor& output : outputs) {
    config.add_output(output);
    is_given |= output.defined();
  }
  for (const at::Tensor& input : inputs) {
    if (input.scalar_type() == common) {
      config.add_const_input(input);
    } else {
      config.add_owned_const_input(input.to(common));
    }
  }
  config.set_check_mem_overlap(is_given).check_all_same_dtype(false).allow_cpu_scalars(true);
  if (!is_given) config.declare_static_dtype(result_type);
  return config.build();
}

// A TensorIterator allocates outputs of one dtype. Where there are several, the first is asked how
// the others have to lie in memory.
void allocate_of_several_types(at::TensorList inputs, at::ScalarType common,
                               const std::vector<at::ScalarType>& types, Tensors& outputs) {
  const auto iterator = make_iterator(types.front(), {at::Tensor()}, common, inputs);
  for (size_t i = 0; i < types.size(); ++i) {
    outputs[i] = at::empty_like(iterator.output(), iterator.output().options().dtype(types[i]));
  }
}

class ElementwiseLauncher final : public c10::OperatorKernel {
 public:
  ElementwiseLauncher(std::shared_ptr<Elementwise> elementwise, aten::OperatorCount* count)
      : elementwise_(std::move(elementwise)), count_(count) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (count_ != nullptr) count_->own.fetch_add(1, std::memory_order_relaxed);
    elementwise_->launch(*stack);
  }

 private:
  std::shared_ptr<Elementwise> elementwise_;
  // On foo only.
  aten::OperatorCount* count_;
};

// The tensors of a call.
struct Operands {
  Tensors inputs;
  // Arguments that are written, or undefined tensors to be allocated.
  Tensors outputs;

  void run(Kernel& kernel, Signature& signature, const std::vector<at::ScalarType>& types,
           const int64_t* scalars) {
    const auto common = static_cast<at::ScalarType>(signature.front());
    const bool is_of_one_type =
        std::all_of(types.begin(), types.end(), [&](auto type) { return type == types.front(); });
    if (!outputs.front().defined() && !is_of_one_type) {
      allocate_of_several_types(inputs, common, types, outputs);
    }
    auto iterator = make_iterator(types.front(), outputs, common, inputs);
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i] = iterator.output(i);
    if (iterator.numel() == 0) return;
    auto* function = kernel.get<ElementwiseFunction>(signature);
    iterator.for_each([=](char** data, const int64_t* strides, int64_t size0,
                          int64_t size1) { function(data, strides, size0, size1, scalars); },
                      at::internal::GRAIN_SIZE);
  }
};

}  // namespace

Elementwise::Elementwise(const std::string& operator_name, const std::string& kernel,
                         std::vector<Parameter> parameters, ResultTypes result_types,
                         std::string input_types)
    : operator_name_(operator_name),
      name_(short_name(operator_name)),
      kernel_(kernel),
      parameters_(std::move(parameters)),
      result_types_(std::move(result_types)),
      input_types_(std::move(input_types)),
      returns_(find_operator(operator_name).schema().returns().size()) {
  for (const Parameter& parameter : parameters_) {
    if (!parameter.is_tensor()) continue;
    if (parameter.role != Parameter::Role::kRead) written_names_.push_back(parameter.name);
    if (parameter.role == Parameter::Role::kOut) continue;
    input_names_ += (input_names_.empty() ? "" : " and ") + parameter.name;
  }
}

const std::vector<at::ScalarType>& Elementwise::result_types(at::TensorList inputs,
                                                             at::TensorList outputs) const {
  const at::ScalarType common = common_type(inputs);
  const auto entry = result_types_.find(common);
  TORCH_CHECK_TYPE(entry != result_types_.end(), name_, ": ", input_names_, " must have ",
                   input_types_, ", got ", dtype_name(common));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::ScalarType result = entry->second[i];
    TORCH_CHECK_TYPE(c10::canCast(result, outputs[i].scalar_type()), name_, ": ", written_names_[i],
                     " must have a dtype that ", dtype_name(result), " can be cast to, got ",
                     dtype_name(outputs[i].scalar_type()));
  }
  return entry->second;
}

void Elementwise::launch(torch::jit::Stack& stack) {
  Operands operands;
  Signature signature{0};
  c10::SmallVector<int64_t, 8> scalars;
  const auto arguments = torch::jit::last(stack, parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    const c10::IValue& argument = arguments[i];
    if (parameter.is_optional) signature.push_back(argument.isNone() ? kAbsent : kGiven);
    if (!parameter.is_tensor()) scalars.push_back(argument.isNone() ? 0 : scalar_bits(argument));
    if (argument.isNone() || !parameter.is_tensor()) continue;
    const at::Tensor& tensor = argument.toTensor();
    if (parameter.role != Parameter::Role::kOut) operands.inputs.push_back(tensor);
    if (parameter.role != Parameter::Role::kRead) operands.outputs.push_back(tensor);
  }
  const auto& types = result_types(operands.inputs, operands.outputs);
  signature.front() = static_cast<int8_t>(common_type(operands.inputs));
  Tensors targets = operands.outputs;
  bool is_direct = true;
  for (size_t i = 0; i < targets.size(); ++i) is_direct &= targets[i].scalar_type() == types[i];
  if (targets.empty() || !is_direct) {
    operands.outputs.assign(types.size(), at::Tensor());
  }
  operands.run(kernel_, signature, types, scalars.data());
  for (size_t i = 0; i < targets.size() && !is_direct; ++i) {
    at::native::resize_output(targets[i], operands.outputs[i].sizes());
    targets[i].copy_(operands.outputs[i]);
  }
  Tensors& results = targets.empty() ? operands.outputs : targets;
  torch::jit::drop(stack, parameters_.size());
  for (size_t i = 0; i < returns_; ++i) stack.emplace_back(std::move(results[i]));
}

c10::RegistrationHandleRAII Elementwise::register_for(c10::DispatchKey key) {
  auto* count =
      key == c10::DispatchKey::PrivateUse1 ? &aten::operator_count(operator_name_) : nullptr;
  return hold_kernel(operator_name_, key,
                     c10::KernelFunction::makeFromBoxedFunctor(
                         std::make_unique<ElementwiseLauncher>(shared_from_this(), count)));
}

}  // namespace foo
