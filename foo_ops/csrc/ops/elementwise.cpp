#include "ops/elementwise.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>

#include "launch/memory.h"
#include "launch/overlap.h"
#include "launch/registration.h"
#include "launch/symbols.h"
#include "ops/values.h"
#include "ops/view.h"

namespace foo {

namespace {

using OperandTensors = c10::SmallVector<at::Tensor, 4>;

// Tensors and numbers of a call.
struct Operands {
  OperandTensors inputs;
  // Written arguments, or undefined tensors to be allocated.
  OperandTensors outputs;
  // For each input, the dtype in which the kernel reads it.
  c10::SmallVector<at::ScalarType, 4> input_types;
  const std::vector<at::ScalarType>& output_types;
  // Arguments that are not tensors.
  c10::SmallVector<int64_t, 8> scalars;
  Values values;

  bool outputs_are_given() const { return outputs.front().defined(); }
};

// Allocates undefined outputs, all of one dtype.
at::TensorIterator make_iterator(const Operands& operands, at::TensorList outputs) {
  at::TensorIteratorConfig config;
  bool is_given = false;
  for (const at::Tensor& output : outputs) {
    config.add_output(output);
    is_given |= output.defined();
  }
  for (size_t i = 0; i < operands.inputs.size(); ++i) {
    const at::Tensor& input = operands.inputs[i];
    if (input.scalar_type() == operands.input_types[i]) {
      config.add_const_input(input);
    } else {
      config.add_owned_const_input(input.to(operands.input_types[i]));
    }
  }
  config.set_check_mem_overlap(is_given).check_all_same_dtype(false).allow_cpu_scalars(true);
  if (!is_given) config.declare_static_dtype(operands.output_types.front());
  return config.build();
}

// A TensorIterator allocates outputs of one dtype only. The others get the memory layout of the
// first.
void allocate_of_several_types(Operands& operands) {
  const NewResults results;
  const auto iterator = make_iterator(operands, {at::Tensor()});
  for (size_t i = 0; i < operands.outputs.size(); ++i) {
    operands.outputs[i] = at::empty_like(
        iterator.output(), iterator.output().options().dtype(operands.output_types[i]));
  }
}

void run_iterator(Operands& operands, Kernel& kernel, const Signature& signature) {
  const auto& types = operands.output_types;
  const bool is_of_one_type =
      std::all_of(types.begin(), types.end(), [&](auto type) { return type == types.front(); });
  if (!operands.outputs_are_given() && !is_of_one_type) allocate_of_several_types(operands);
  auto iterator = [&] {
    const NewResults results;
    return make_iterator(operands, operands.outputs);
  }();
  for (size_t i = 0; i < operands.outputs.size(); ++i) operands.outputs[i] = iterator.output(i);
  if (iterator.numel() == 0) return;
  auto* function = kernel.get<ElementwiseFunction>(signature);
  iterator.for_each([function, scalars = operands.scalars.data()](
                        char** data, const int64_t* strides, int64_t size0,
                        int64_t size1) { function(data, strides, size0, size1, scalars); },
                    grain_size(at::internal::GRAIN_SIZE));
}

// Whether the fast path applies: contiguous inputs of one shape, in the dtypes that the kernel
// reads, and new results. TensorIterator would take half a microsecond to find that out.
bool can_run_contiguous(const Operands& operands) {
  if (operands.outputs_are_given()) return false;
  const at::Tensor& first = operands.inputs.front();
  for (size_t i = 0; i < operands.inputs.size(); ++i) {
    const at::Tensor& input = operands.inputs[i];
    if (input.scalar_type() != operands.input_types[i] || !input.is_contiguous() ||
        !input.sizes().equals(first.sizes()) || input.device() != first.device()) {
      return false;
    }
  }
  return true;
}

at::Tensor allocate(const at::Tensor& like, at::ScalarType dtype) {
  const NewResults results;
  const auto options = like.options().dtype(dtype);
  // Bypass the dispatcher, which takes a tenth of a microsecond.
  return like.is_cpu() ? at::cpu::empty(like.sizes(), options) : at::empty(like.sizes(), options);
}

void run_contiguous(Operands& operands, Kernel& kernel, const Signature& signature) {
  c10::SmallVector<char*, 8> data;
  // Strides of the inner loop, and of the outer one, which has a single step.
  c10::SmallVector<int64_t, 16> strides;
  for (size_t i = 0; i < operands.outputs.size(); ++i) {
    operands.outputs[i] = allocate(operands.inputs.front(), operands.output_types[i]);
    data.push_back(static_cast<char*>(operands.outputs[i].mutable_data_ptr()));
    strides.push_back(operands.outputs[i].element_size());
  }
  for (const at::Tensor& input : operands.inputs) {
    data.push_back(static_cast<char*>(const_cast<void*>(input.const_data_ptr())));
    strides.push_back(input.element_size());
  }
  strides.resize(2 * data.size(), 0);
  const int64_t numel = operands.inputs.front().numel();
  if (numel == 0) return;
  auto* function = kernel.get<ElementwiseFunction>(signature);
  const auto run = [&](int64_t begin, int64_t end) {
    auto moved = data;
    for (size_t i = 0; i < data.size(); ++i) moved[i] += begin * strides[i];
    function(moved.data(), strides.data(), end - begin, 1, operands.scalars.data());
  };
  at::parallel_for(0, numel, grain_size(at::internal::GRAIN_SIZE), run);
}

void run(Operands& operands, Kernel& kernel, const Signature& signature) {
  if (can_run_contiguous(operands)) {
    run_contiguous(operands, kernel, signature);
  } else {
    run_iterator(operands, kernel, signature);
  }
  rethrow_raised();
}

// Whether an argument takes part in type promotion.
bool is_promoted(const Parameter& parameter) {
  return parameter.is_tensor() && parameter.role != Parameter::Role::kOut &&
         parameter.own_types.empty();
}

class ElementwiseLauncher final : public c10::OperatorKernel {
 public:
  ElementwiseLauncher(std::shared_ptr<Elementwise> elementwise, OperatorCount* count)
      : elementwise_(std::move(elementwise)), count_(count) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    begin_call(count_);
    elementwise_->launch(*stack);
  }

 private:
  std::shared_ptr<Elementwise> elementwise_;
  OperatorCount* count_;
};

}  // namespace

Elementwise::Elementwise(const std::string& operator_name, const std::string& kernel,
                         std::vector<Parameter> parameters, ResultTypes result_types,
                         std::string input_types, std::vector<int64_t> depends_on)
    : operator_name_(operator_name),
      name_(short_name(operator_name)),
      kernel_(kernel, texts_of(parameters)),
      parameters_(std::move(parameters)),
      result_types_(std::move(result_types)),
      input_types_(std::move(input_types)),
      depends_on_(std::move(depends_on)),
      returns_(find_operator(operator_name).schema().returns().size()),
      has_lists_(std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& it) {
        return it.kind == Parameter::Kind::kInts || it.kind == Parameter::Kind::kFloats;
      })) {
  for (const Parameter& parameter : parameters_) {
    if (!is_promoted(parameter)) continue;
    ++promoted_;
    promoted_names_ += (promoted_names_.empty() ? "" : " and ") + parameter.name;
  }
}

at::ScalarType Elementwise::common_type(c10::ArrayRef<c10::IValue> arguments) const {
  at::native::ResultTypeState state = {};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_promoted(parameters_[i]) || arguments[i].isNone()) continue;
    const at::Tensor& tensor = arguments[i].toTensor();
    if (promoted_ == 1) return tensor.scalar_type();
    state = at::native::update_result_type_state(tensor, state);
  }
  return at::native::result_type(state);
}

void Elementwise::check_devices(c10::ArrayRef<c10::IValue> arguments) const {
  c10::Device common(c10::kCPU);
  for (const c10::IValue& argument : arguments) {
    if (common.is_cpu() && argument.isTensor()) common = argument.toTensor().device();
  }
  bool has_number = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!arguments[i].isTensor() || arguments[i].toTensor().device() == common) continue;
    const at::Tensor& tensor = arguments[i].toTensor();
    TORCH_CHECK(!is_written(arguments, i) && tensor.dim() == 0 && tensor.is_cpu(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                common, " and ", tensor.device(), "!");
    TORCH_CHECK(!has_number, "Trying to pass too many CPU scalars to non-CPU kernel!");
    has_number = true;
  }
}

Elementwise::Types Elementwise::types_of(c10::ArrayRef<c10::IValue> arguments) const {
  const at::ScalarType common = common_type(arguments);
  const auto entry = result_types_.find(common);
  TORCH_CHECK_TYPE(entry != result_types_.end(), name_, ": ", promoted_names_, " must have ",
                   input_types_, ", got ", dtype_name(common));
  auto result = entry->second.begin();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    if (!parameter.is_tensor() || arguments[i].isNone()) continue;
    const at::ScalarType own = arguments[i].toTensor().scalar_type();
    const auto& allowed = parameter.own_types;
    TORCH_CHECK_TYPE(
        allowed.empty() || std::find(allowed.begin(), allowed.end(), own) != allowed.end(), name_,
        ": ", parameter.name, " must have ", parameter.own_types_in_words, ", got ",
        dtype_name(own));
    if (parameter.role == Parameter::Role::kRead) continue;
    check_can_cast(name_, parameter.name, *result++, arguments[i].toTensor());
  }
  return {common, entry->second};
}

void Elementwise::check_values(c10::ArrayRef<c10::IValue> arguments, at::ScalarType common) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].is_tensor() || arguments[i].isNone()) continue;
    check_value(name_, parameters_[i], arguments[i], {common, &promoted_names_});
  }
}

void Elementwise::check_targets(c10::ArrayRef<c10::IValue> arguments,
                                c10::SymIntArrayRef sizes) const {
  for_each_written(parameters_, arguments, [&](size_t i, const at::Tensor& target) {
    if (have_sizes(target.sym_sizes(), sizes)) return;
    const bool is_input = std::any_of(
        arguments.begin(), arguments.end(), [&, out = &arguments[i]](const auto& argument) {
          return &argument != out && argument.isTensor() && argument.toTensor().is_same(target);
        });
    TORCH_CHECK(parameters_[i].role == Parameter::Role::kOut && !is_input, "output with shape ",
                target.sym_sizes(), " doesn't match the broadcast shape ", sizes);
    check_resizable(name_, parameters_[i].name, target, sizes, other_tensors(arguments, i));
  });
  for_each_written(parameters_, arguments, [&](size_t i, const at::Tensor& target) {
    // A tensor that will be resized shares its memory with no other.
    if (have_sizes(target.sym_sizes(), sizes)) check_overlaps(arguments, i);
  });
}

void Elementwise::check_overlaps(c10::ArrayRef<c10::IValue> arguments, size_t index) const {
  const at::Tensor& target = arguments[index].toTensor();
  TORCH_CHECK(!overlaps_itself(target),
              "unsupported operation: more than one element of the written-to tensor refers to a "
              "single memory location. Please clone() the tensor before performing the "
              "operation.");
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_input(arguments, i)) continue;
    TORCH_CHECK(overlap_of(target, arguments[i].toTensor()) != Overlap::kOther,
                "unsupported operation: some elements of the input tensor and the written-to "
                "tensor refer to a single memory location. Please clone() the tensor before "
                "performing the operation.");
  }
  check_apart(name_, parameters_, arguments, index);
}

at::DimVector Elementwise::check_written(c10::ArrayRef<c10::IValue> arguments) const {
  check_devices(arguments);
  at::DimVector sizes;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_input(arguments, i)) continue;
    sizes = at::infer_size_dimvector(sizes, arguments[i].toTensor().sizes());
  }
  check_targets(arguments, c10::fromIntArrayRefUnchecked(sizes));
  return sizes;
}

bool Elementwise::is_missing(c10::ArrayRef<c10::IValue> arguments, size_t result) const {
  return depends_on_[result] >= 0 && arguments[depends_on_[result]].isNone();
}

bool Elementwise::is_input(c10::ArrayRef<c10::IValue> arguments, size_t index) const {
  return parameters_[index].role != Parameter::Role::kOut && arguments[index].isTensor();
}

bool Elementwise::is_written(c10::ArrayRef<c10::IValue> arguments, size_t index) const {
  return parameters_[index].role != Parameter::Role::kRead && arguments[index].isTensor();
}

void Elementwise::launch(torch::jit::Stack& stack) {
  const auto arguments = torch::jit::last(stack, parameters_.size());
  const Types types = types_of(arguments);
  std::vector<at::ScalarType> present;
  for (size_t i = 0; i < depends_on_.size(); ++i) {
    if (!is_missing(arguments, i)) present.push_back(types.results[i]);
  }
  const auto& result_types = depends_on_.empty() ? types.results : present;
  Operands operands{{}, {}, {}, result_types, {}, {}};
  const Common common{types.common, &promoted_names_};
  Signature signature{static_cast<int16_t>(types.common)};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    const c10::IValue& argument = arguments[i];
    if (!parameter.is_tensor()) {
      operands.scalars.push_back(
          argument.isNone() ? 0 : operands.values.add(name_, parameter, argument, common));
      Values::sign(kernel_, parameter, argument, signature);
      continue;
    }
    if (argument.isNone()) {
      signature.push_back(kAbsent);
      continue;
    }
    const at::Tensor& tensor = argument.toTensor();
    const bool is_own = !parameter.own_types.empty();
    if (is_own) {
      signature.push_back(static_cast<int16_t>(tensor.scalar_type()));
    } else if (parameter.is_optional) {
      signature.push_back(kGiven);
    }
    if (parameter.role != Parameter::Role::kOut) {
      operands.inputs.push_back(tensor);
      operands.input_types.push_back(is_own ? tensor.scalar_type() : types.common);
    }
    if (parameter.role != Parameter::Role::kRead) operands.outputs.push_back(tensor);
  }
  std::optional<Outside> outside;
  if (has_lists_ && checks_bounds()) {
    signature.push_back(kChecked);
    outside.emplace().is_found = 0;
    operands.values.check_bounds(*outside);
  }
  OperandTensors targets = operands.outputs;
  if (!targets.empty()) {
    const auto sizes = check_written(arguments);
    // Compile before anything is resized: this may raise.
    const bool is_empty = c10::multiply_integers(sizes) == 0;
    if (!is_empty) kernel_.get<ElementwiseFunction>(signature);
  }
  bool is_direct = true;
  for (size_t i = 0; i < targets.size(); ++i) {
    is_direct &= targets[i].scalar_type() == result_types[i];
  }
  if (targets.empty() || !is_direct) operands.outputs.assign(result_types.size(), at::Tensor());
  run(operands, kernel_, signature);
  if (outside.has_value() && outside->is_found != 0) {
    refuse_outside(name_, *operands.values.name_of(outside->view), *outside);
  }
  for (size_t i = 0; i < targets.size() && !is_direct; ++i) {
    at::native::resize_output(targets[i], operands.outputs[i].sizes());
    targets[i].copy_(operands.outputs[i]);
  }
  OperandTensors& results = targets.empty() ? operands.outputs : targets;
  if (!depends_on_.empty()) {
    for (size_t i = 0; i < returns_; ++i) {
      if (is_missing(arguments, i)) results.insert(results.begin() + i, at::Tensor());
    }
  }
  torch::jit::drop(stack, parameters_.size());
  for (size_t i = 0; i < returns_; ++i) stack.emplace_back(std::move(results[i]));
}

c10::RegistrationHandleRAII Elementwise::register_for(c10::DispatchKey key) {
  return hold_kernel(
      operator_name_, key,
      c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<ElementwiseLauncher>(
          shared_from_this(), count_for(key, operator_name_))));
}

}  // namespace foo
