#include "launch/gradients.h"

#include <ATen/ops/real.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "launch/registration.h"

namespace foo {

namespace {

using torch::autograd::variable_list;

constexpr const char* kGradientPrefix = "grad_";
constexpr const char* kRequiresGradSuffix = "_requires_grad";

bool is_optional(const c10::Argument& argument) {
  return argument.type()->kind() == c10::TypeKind::OptionalType;
}

bool is_tensor_argument(const c10::Argument& argument) {
  const auto type = is_optional(argument)
                        ? argument.type()->expectRef<c10::OptionalType>().getElementType()
                        : argument.type();
  return type->kind() == c10::TypeKind::TensorType;
}

// Returns the index of the argument with this name, or -1.
int64_t find_name(const std::vector<c10::Argument>& among, const std::string& name) {
  const auto found = std::find_if(among.begin(), among.end(), [&](const c10::Argument& argument) {
    return argument.name() == name;
  });
  return found == among.end() || name.empty() ? -1 : found - among.begin();
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() > end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

bool has_names(const std::vector<c10::Argument>& results) {
  return std::any_of(results.begin(), results.end(),
                     [](const c10::Argument& result) { return !result.name().empty(); });
}

// Converts an undefined tensor to None.
c10::IValue optional(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

}  // namespace

BackwardOperator::BackwardOperator(const c10::OperatorHandle& op,
                                   const c10::OperatorHandle& backward)
    : backward_(backward), name_(c10::toString(backward.operator_name())) {
  const auto& schema = op.schema();
  TORCH_CHECK_TYPE(!schema.is_mutable() && !backward.schema().is_mutable(), name_, ": neither ",
                   schema.name(), " nor its backward operator may write to an argument");
  for (const auto i : c10::irange(schema.arguments().size())) {
    if (is_tensor_argument(schema.arguments()[i])) tensor_arguments_.push_back(i);
  }
  size_t next_gradient = 0;
  for (const c10::Argument& argument : backward.schema().arguments()) {
    sources_.push_back(source_of(argument, schema, next_gradient));
  }
  find_results(schema, backward.schema().returns());
}

void BackwardOperator::find_results(const c10::FunctionSchema& schema,
                                    const std::vector<c10::Argument>& results) {
  if (!has_names(results)) {
    TORCH_CHECK_TYPE(results.size() == tensor_arguments_.size(), name_, ": must have ",
                     tensor_arguments_.size(),
                     " results if they have no names, one for each tensor of ", schema.name(),
                     ", got ", results.size());
    for (const auto i : c10::irange(results.size())) results_.push_back(int64_t(i));
    return;
  }
  for (const size_t index : tensor_arguments_) {
    const std::string& argument = schema.arguments()[index].name();
    int64_t found = find_name(results, kGradientPrefix + argument);
    for (const auto i : c10::irange(results.size())) {
      const std::string& name = results[i].name();
      const bool is_shared = name.rfind(kGradientPrefix + argument + "_and_", 0) == 0 ||
                             ends_with(name, "_and_" + argument);
      if (found < 0 && is_shared) found = int64_t(i);
    }
    results_.push_back(found);
  }
  TORCH_CHECK_TYPE(std::any_of(results_.begin(), results_.end(), [](auto i) { return i >= 0; }),
                   name_, ": one of its results must be named grad_<argument> for a tensor of ",
                   schema.name());
}

int64_t BackwardOperator::missing_gradient(c10::ArrayRef<c10::IValue> arguments) const {
  for (const auto edge : c10::irange(tensor_arguments_.size())) {
    const c10::IValue& argument = arguments[tensor_arguments_[edge]];
    if (results_[edge] < 0 && argument.isTensor() && argument.toTensor().requires_grad()) {
      return int64_t(tensor_arguments_[edge]);
    }
  }
  return -1;
}

variable_list BackwardOperator::without_gradient(const variable_list& results) const {
  variable_list found;
  for (const auto i : c10::irange(results.size())) {
    const bool is_taken = std::any_of(sources_.begin(), sources_.end(), [&](const Source& source) {
      return source.kind == Source::kGradient && source.index == i;
    });
    if (!is_taken && results[i].defined()) found.push_back(results[i]);
  }
  return found;
}

BackwardOperator::Source BackwardOperator::source_of(const c10::Argument& argument,
                                                     const c10::FunctionSchema& schema,
                                                     size_t& next_gradient) const {
  const std::string& name = argument.name();
  if (const int64_t found = find_name(schema.arguments(), name); found >= 0) {
    const c10::Argument& own = schema.arguments()[found];
    TORCH_CHECK_TYPE(is_tensor_argument(own) == is_tensor_argument(argument), name_, ": argument ",
                     name, " must have the same type as in ", schema.name(), ", got ",
                     argument.type()->repr_str());
    return {is_tensor_argument(own) ? Source::kTensor : Source::kNumber, size_t(found),
            is_optional(argument), is_optional(argument) && !is_optional(own)};
  }
  if (const int64_t found = find_name(schema.returns(), name); found >= 0) {
    return {Source::kResult, size_t(found), is_optional(argument), false};
  }
  if (ends_with(name, kRequiresGradSuffix)) {
    const auto of = name.substr(0, name.size() - std::string(kRequiresGradSuffix).size());
    if (const int64_t found = find_name(schema.arguments(), of); found >= 0) {
      return {Source::kRequiresGrad, edge_of(found), false, false};
    }
  }
  int64_t result = -1;
  if (!has_names(schema.returns())) {
    if (next_gradient < schema.returns().size()) result = int64_t(next_gradient++);
  } else if (name.rfind(kGradientPrefix, 0) == 0) {
    result = find_name(schema.returns(), name.substr(5));
  }
  TORCH_CHECK_TYPE(result >= 0 && is_tensor_argument(argument), name_, ": argument ", name,
                   " must be an argument or a result of ", schema.name(),
                   ", the gradient of a result (grad_<result>), or whether an argument needs a "
                   "gradient (<argument>_requires_grad); ",
                   schema);
  const bool may_be_none = is_optional(argument) && !is_optional(schema.returns()[result]);
  return {Source::kGradient, size_t(result), may_be_none, false};
}

size_t BackwardOperator::edge_of(size_t argument) const {
  return std::find(tensor_arguments_.begin(), tensor_arguments_.end(), argument) -
         tensor_arguments_.begin();
}

bool BackwardOperator::another_requires_grad(c10::ArrayRef<c10::IValue> arguments,
                                             size_t index) const {
  return std::any_of(tensor_arguments_.begin(), tensor_arguments_.end(), [&](size_t other) {
    return other != index && arguments[other].isTensor() &&
           arguments[other].toTensor().requires_grad();
  });
}

SavedForBackward BackwardOperator::saved(c10::ArrayRef<c10::IValue> arguments,
                                         c10::ArrayRef<c10::IValue> results) const {
  SavedForBackward saved;
  for (const Source& source : sources_) {
    if (source.kind == Source::kResult) {
      saved.tensors.push_back(tensors_of(results)[source.index]);
    } else if (source.kind == Source::kTensor) {
      const c10::IValue& argument = arguments[source.index];
      const bool is_saved = argument.isTensor() &&
                            (!source.is_factor || another_requires_grad(arguments, source.index));
      saved.tensors.push_back(is_saved ? argument.toTensor() : at::Tensor());
    } else if (source.kind == Source::kNumber) {
      saved.numbers.push_back(arguments[source.index]);
    }
  }
  for (const size_t index : tensor_arguments_) {
    const c10::IValue& argument = arguments[index];
    saved.is_complex.push_back(argument.isTensor() && argument.toTensor().is_complex());
  }
  if (results.size() == 1) return saved;
  for (const at::Tensor& result : tensors_of(results)) {
    saved.results.push_back(result.defined() ? zeros_like_result(result)
                                             : torch::autograd::VariableInfo());
  }
  return saved;
}

variable_list BackwardOperator::gradients(const variable_list& of_results,
                                          const SavedForBackward& saved,
                                          const std::vector<bool>& needed) const {
  variable_list found(tensor_arguments_.size());
  torch::jit::Stack stack;
  stack.reserve(sources_.size());
  size_t tensor = 0;
  size_t number = 0;
  at::OptionalDeviceGuard guard;
  for (const Source& source : sources_) {
    switch (source.kind) {
      case Source::kTensor:
      case Source::kResult:
        stack.push_back(optional(saved.tensors[tensor++]));
        break;
      case Source::kNumber:
        stack.push_back(saved.numbers[number++]);
        break;
      case Source::kRequiresGrad:
        stack.emplace_back(bool(needed[source.index]));
        break;
      case Source::kGradient: {
        const at::Tensor& gradient = of_results[source.index];
        const bool is_zero = !gradient.defined() && !source.is_optional;
        stack.push_back(optional(is_zero ? saved.results[source.index].zeros(guard) : gradient));
      }
    }
  }
  backward_.callBoxed(&stack);
  for (const auto edge : c10::irange(found.size())) {
    if (!needed[edge] || results_[edge] < 0) continue;
    if (stack[results_[edge]].isNone()) continue;
    const at::Tensor& gradient = stack[results_[edge]].toTensor();
    if (!gradient.defined()) continue;
    found[edge] = gradient.is_complex() && !saved.is_complex[edge] ? at::real(gradient) : gradient;
  }
  return found;
}

}  // namespace foo
