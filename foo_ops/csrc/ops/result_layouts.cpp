#include "ops/result_layouts.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <string>

#include "launch/parameter.h"

namespace foo {

namespace {

at::Tensor without_data(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

bool has_fake_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::Meta);
}

std::vector<ResultLayout> ask_fake_kernel(const c10::OperatorHandle& op,
                                          c10::ArrayRef<c10::IValue> arguments) {
  const std::string name = c10::toString(op.operator_name());
  torch::jit::Stack stack;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensorList()) {
      std::vector<at::Tensor> tensors = argument.toTensorVector();
      std::transform(tensors.begin(), tensors.end(), tensors.begin(), without_data);
      stack.emplace_back(std::move(tensors));
      continue;
    }
    stack.push_back(argument.isTensor()      ? without_data(argument.toTensor())
                    : argument.isGenerator() ? c10::IValue()
                                             : argument);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  const size_t results = op.schema().returns().size();
  TORCH_CHECK_TYPE(stack.size() == results, name, ": its fake kernel must return ", results,
                   results == 1 ? " result" : " results", ", got ", stack.size());
  std::vector<ResultLayout> layouts;
  for (size_t i = 0; i < stack.size(); ++i) {
    const at::Tensor tensor = stack[i].isTensor() ? stack[i].toTensor() : at::Tensor();
    const c10::Argument& result = op.schema().returns()[i];
    const bool may_be_none =
        result.alias_info() != nullptr || result.type()->kind() == c10::TypeKind::OptionalType;
    TORCH_CHECK_TYPE(tensor.defined() || may_be_none, name,
                     ": its fake kernel must return a tensor, got None");
    layouts.push_back(tensor.defined() ? ResultLayout{tensor.sizes().vec(), tensor.strides().vec(),
                                                      tensor.scalar_type()}
                                       : ResultLayout{});
  }
  return layouts;
}

}  // namespace

void ResultLayouts::ask_tensor(Question& question, const at::Tensor& tensor) {
  question.push_back(int64_t(tensor.scalar_type()));
  question.push_back(tensor.dim());
  question.append(tensor.sizes().begin(), tensor.sizes().end());
  question.append(tensor.strides().begin(), tensor.strides().end());
}

void ResultLayouts::ask_value(Question& question, const c10::IValue& value) {
  if (value.isInt() || value.isDouble() || value.isBool() || value.isSymInt()) {
    // Scalars 1, 1.0 and True are different questions.
    question.push_back(value.isDouble() ? -2 : value.isBool() ? -3 : -4);
    question.push_back(scalar_bits(value));
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    question.push_back(int64_t(text.size()));
    question.append(text.begin(), text.end());
  } else if (value.isList()) {
    const auto items = value.toListRef();
    question.push_back(int64_t(items.size()));
    for (const c10::IValue& item : items) ask_value(question, item);
  } else if (value.isTensor()) {
    ask_tensor(question, value.toTensor());
  } else {
    const auto number = value.toComplexDouble();
    question.push_back(-5);
    question.push_back(std::bit_cast<int64_t>(number.real()));
    question.push_back(std::bit_cast<int64_t>(number.imag()));
  }
}

void ResultLayouts::ask_settings(Question& question) {
  const auto& context = at::globalContext();
  question.push_back(int64_t(c10::get_default_dtype_as_scalartype()));
  question.push_back(context.deterministicAlgorithms() | c10::GradMode::is_enabled() << 1 |
                     c10::InferenceMode::is_enabled() << 2);
  for (const auto device : {at::kCPU, at::kPrivateUse1}) {
    const bool is_enabled = at::autocast::is_autocast_enabled(device);
    question.push_back(is_enabled ? int64_t(at::autocast::get_autocast_dtype(device)) : -1);
  }
}

SharedLayouts ResultLayouts::of(c10::ArrayRef<c10::IValue> arguments) {
  Question question;
  ask_settings(question);
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      ask_tensor(question, argument.toTensor());
    } else if (argument.isNone() || argument.isGenerator()) {
      question.push_back(-1);
    } else {
      ask_value(question, argument);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    const auto known = answers_.find(question);
    if (known != answers_.end()) return known->second;
  }
  const auto answer = std::make_shared<const std::vector<ResultLayout>>(ask(arguments));
  const std::lock_guard lock(mutex_);
  if (answers_.size() >= kMostAnswers) answers_.clear();
  answers_.emplace(question, answer);
  return answer;
}

std::vector<ResultLayout> ResultLayouts::ask(c10::ArrayRef<c10::IValue> arguments) const {
  TORCH_CHECK(has_fake_kernel(op_), c10::toString(op_.operator_name()),
              ": a tile kernel needs a fake kernel, which says how its results are allocated: "
              "register one with foo_ops.library.register_fake");
  return ask_fake_kernel(op_, arguments);
}

}  // namespace foo
