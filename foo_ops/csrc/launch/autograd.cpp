#include "launch/autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/conj.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/complex.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "launch/parameter.h"
#include "launch/registration.h"

namespace foo {
namespace {

using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::VariableInfo;
using torch::jit::Stack;
namespace compiled = torch::dynamo::autograd;

bool requires_grad(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

bool is_dual(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Whether the predicate holds for a tensor, or for any tensor of a list.
template <class Predicate>
bool any_tensor(const IValue& argument, const Predicate& predicate) {
  if (argument.isTensor()) return predicate(argument.toTensor());
  if (argument.isTensorList()) {
    const auto tensors = argument.toTensorList();
    return std::any_of(tensors.begin(), tensors.end(), predicate);
  }
  if (argument.isOptionalTensorList()) {
    const auto tensors = argument.toOptionalTensorList();
    return std::any_of(tensors.begin(), tensors.end(), [&](const std::optional<at::Tensor>& it) {
      return it.has_value() && predicate(*it);
    });
  }
  return false;
}

}  // namespace

bool needs_gradient(const OperatorHandle& op, const Stack& stack) {
  const auto arguments = arguments_of(op, stack);
  return at::GradMode::is_enabled() &&
         std::any_of(arguments.begin(), arguments.end(),
                     [](const IValue& argument) { return any_tensor(argument, requires_grad); });
}

bool has_tangent(const OperatorHandle& op, const Stack& stack) {
  const auto arguments = arguments_of(op, stack);
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const IValue& argument) { return any_tensor(argument, is_dual); });
}

std::vector<at::Tensor> written_tensors(const OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = arguments_of(op, stack);
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for_each_tensor(values[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_inference()) written.push_back(tensor);
    });
  }
  return written;
}

void redispatch_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

namespace {

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

namespace {

// Code compiled for one key is wrong for another, although the node has the same name.
constexpr bool kGetsNewName = true;

// "SiluMulBackward" for mylib::silu_mul_backward.
std::string node_name(const std::string& operator_name) {
  std::string name;
  bool is_start = true;
  for (const char letter : short_name(operator_name)) {
    if (letter == '_') {
      is_start = true;
    } else {
      name += is_start ? char(std::toupper(letter)) : letter;
      is_start = false;
    }
  }
  return name;
}

// Without a gradient of any result the arguments have none: nothing is computed.
variable_list compute(const Gradients& gradients, const variable_list& of_results,
                      const SavedForBackward& saved, const std::vector<bool>& needed) {
  const bool has_any = std::any_of(of_results.begin(), of_results.end(),
                                   [](const at::Tensor& tensor) { return tensor.defined(); });
  return has_any ? gradients.gradients(of_results, saved, needed) : variable_list(needed.size());
}

// Node of autograd's graph whose gradients a backward operator or a formula computes.
class BackwardNode final : public torch::autograd::Node {
 public:
  explicit BackwardNode(std::shared_ptr<const Gradients> gradients)
      : gradients_(std::move(gradients)) {}

  // Called after the results have their history, so that is_result can be determined.
  void save(SavedForBackward saved) {
    for (const at::Tensor& tensor : saved.tensors) {
      // A saved result must not hold its own node, which holds the result.
      const bool is_result = tensor.defined() && tensor.grad_fn().get() == this;
      tensors_.emplace_back(tensor, is_result);
      is_result_.push_back(is_result);
    }
    numbers_ = std::move(saved.numbers);
    is_complex_ = std::move(saved.is_complex);
    results_ = std::move(saved.results);
  }

  variable_list apply(variable_list&& of_results) override {
    return compute(*gradients_, of_results, saved(), needed());
  }

  std::string name() const override { return node_name(gradients_->name()); }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& tensor : tensors_) tensor.reset_data();
  }

  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    args.collect(gradients_->key());
    for (const auto i : c10::irange(tensors_.size())) args.collect(tensors_[i], is_result_[i]);
    for (const IValue& number : numbers_) args.collect(number);
    args.collect(is_complex_);
    args.collect(results_);
  }

  variable_list apply_with_saved(const variable_list& of_results,
                                 compiled::SwapSavedVariables& swapped) override {
    swapped.before(tensors_);
    swapped.before(numbers_);
    swapped.before(results_);
    const SavedForBackward now = saved();
    compiled::PackedArgs packed;
    packed.pack(now.tensors);
    for (const IValue& number : now.numbers) packed.pack(number);
    packed.pack(now.is_complex);
    packed.pack(now.results);
    packed.pack(needed());
    const auto arguments = std::move(packed).vec();
    std::vector<at::TypePtr> schema;
    for (const IValue& argument : arguments) {
      schema.push_back(argument.isTensor() ? at::TypePtr(at::TensorType::get()) : argument.type());
    }
    const auto& compiler = compiled::getPyCompilerInterface();
    const auto name = compiler->bind_function(
        swapped.get_py_compiler(), this->name(),
        [gradients = gradients_, count = numbers_.size()](const variable_list& of_results,
                                                          const std::vector<IValue>& values) {
          compiled::PackedArgs unpacked(values);
          SavedForBackward saved;
          saved.tensors = unpacked.unpack<variable_list>();
          for ([[maybe_unused]] const auto i : c10::irange(count)) {
            saved.numbers.push_back(unpacked.unpack<IValue>());
          }
          saved.is_complex = unpacked.unpack<std::vector<bool>>();
          saved.results = unpacked.unpack<std::vector<VariableInfo>>();
          return compute(*gradients, of_results, saved, unpacked.unpack<std::vector<bool>>());
        },
        schema, kGetsNewName, /*is_traceable=*/true);
    const auto metadata =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    auto found = compiler->call_function(swapped.get_py_compiler(), "apply_functional", name,
                                         of_results, arguments, metadata);
    swapped.after(tensors_);
    swapped.after(numbers_);
    swapped.after(results_);
    return found;
  }

 private:
  SavedForBackward saved() {
    const std::lock_guard<std::mutex> lock(mutex_);
    SavedForBackward saved{{}, numbers_, is_complex_, results_};
    saved.tensors.reserve(tensors_.size());
    for (const auto i : c10::irange(tensors_.size())) {
      saved.tensors.push_back(
          tensors_[i].unpack(is_result_[i] ? getptr() : c10::intrusive_ptr<Node>()));
    }
    return saved;
  }

  std::vector<bool> needed() const {
    std::vector<bool> needed(num_outputs());
    for (const auto edge : c10::irange(needed.size())) {
      needed[edge] = next_edge(edge).is_valid() && task_should_compute_output(edge);
    }
    return needed;
  }

  std::shared_ptr<const Gradients> gradients_;
  std::vector<SavedVariable> tensors_;
  std::vector<bool> is_result_;
  std::vector<IValue> numbers_;
  std::vector<bool> is_complex_;
  std::vector<VariableInfo> results_;
};

class RefusingNode final : public torch::autograd::Node {
 public:
  explicit RefusingNode(std::string message) : message_(std::move(message)) {}

  variable_list apply(variable_list&&) override { TORCH_CHECK_NOT_IMPLEMENTED(false, message_); }

  std::string name() const override { return "NotImplemented"; }

 private:
  std::string message_;
};

// Returns the tensors among arguments or results, list elements one by one; undefined for a None in
// a list.
variable_list tensors_in(c10::ArrayRef<IValue> values) {
  variable_list tensors;
  for (const IValue& value : values) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        tensors.push_back(tensor.value_or(at::Tensor()));
      }
    }
  }
  return tensors;
}

// Returns an edge for each tensor, an invalid one for undefined tensors.
torch::autograd::edge_list edges_to(const variable_list& tensors) {
  torch::autograd::edge_list edges;
  edges.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    edges.push_back(tensor.defined() ? torch::autograd::impl::gradient_edge(tensor)
                                     : torch::autograd::Edge());
  }
  return edges;
}

// Returns the arguments at these places, undefined for None.
variable_list tensors_at(c10::ArrayRef<IValue> arguments, c10::ArrayRef<size_t> places) {
  variable_list tensors;
  tensors.reserve(places.size());
  for (const size_t place : places) {
    tensors.push_back(arguments[place].isTensor() ? arguments[place].toTensor() : at::Tensor());
  }
  return tensors;
}

void record_results(const variable_list& results,
                    const c10::intrusive_ptr<torch::autograd::Node>& node,
                    const variable_list& without_gradient = {}) {
  for (const at::Tensor& result : results) {
    const bool has_gradient =
        result.defined() && torch::autograd::isDifferentiableType(result.scalar_type()) &&
        std::none_of(without_gradient.begin(), without_gradient.end(),
                     [&](const at::Tensor& other) { return other.is_same(result); });
    if (has_gradient) {
      torch::autograd::set_history(result, node);
    } else {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    }
  }
}

Stack copy_arguments(const OperatorHandle& op, const Stack& stack) {
  return torch::jit::last(stack, op.schema().arguments().size()).vec();
}

auto results_of(const OperatorHandle& op, const Stack& stack) {
  return torch::jit::last(stack, op.schema().returns().size());
}

KeptByFormula keep_without_recording(const Formula& formula, const OperatorHandle& op,
                                     c10::ArrayRef<IValue> arguments,
                                     c10::ArrayRef<IValue> results) {
  const at::AutoGradMode no_gradients(false);
  const c10::AutoFwGradMode no_tangents(false);
  return formula.keep(op.schema(), arguments, results);
}

// Calls an operator below autograd and records the call in autograd's graph, like the code that
// PyTorch generates for its own operators. torch.func would refuse a torch::autograd::Function.
void call_and_record(const std::shared_ptr<const BackwardOperator>& backward,
                     const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto node = c10::make_intrusive<BackwardNode>(backward);
  const auto arguments = copy_arguments(op, *stack);
  node->set_next_edges(edges_to(tensors_at(arguments, backward->tensor_arguments())));
  redispatch_below_autograd(op, keys, stack);
  const auto results = results_of(op, *stack);
  const auto tensors = tensors_of(results);
  record_results(tensors, node, backward->without_gradient(tensors));
  node->save(backward->saved(arguments, results));
}

// Same, with the gradients of a formula.
void call_and_record_formula(const std::shared_ptr<const Formula>& formula,
                             const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto arguments = copy_arguments(op, *stack);
  auto edges = edges_to(tensors_in(arguments));
  redispatch_below_autograd(op, keys, stack);
  const auto results = results_of(op, *stack);
  KeptByFormula kept = keep_without_recording(*formula, op, arguments, results);
  auto node = c10::make_intrusive<BackwardNode>(std::move(kept.gradients));
  node->set_next_edges(std::move(edges));
  auto tensors = tensors_in(results);
  std::erase_if(tensors, [](const at::Tensor& tensor) { return !tensor.defined(); });
  record_results(tensors, node, kept.non_differentiable);
  SavedForBackward saved{std::move(kept.saved_tensors)};
  // If the gradient of the only result is missing, there is nothing to compute.
  if (kept.materializes_gradients && tensors.size() > 1)
    for (const at::Tensor& tensor : tensors) saved.results.push_back(zeros_like_result(tensor));
  node->save(std::move(saved));
}

// Same, for an operator without derivatives: the node throws a NotImplementedError.
void call_and_record_refusal(const std::string& message, const OperatorHandle& op,
                             DispatchKeySet keys, Stack* stack) {
  auto node = c10::make_intrusive<RefusingNode>(message);
  node->set_next_edges(edges_to(tensors_in(copy_arguments(op, *stack))));
  const auto written = written_tensors(op, *stack);
  torch::autograd::check_inplace(written, /*requires_grad=*/true);
  redispatch_below_autograd(op, keys, stack);
  if (written.empty()) {
    record_results(tensors_in(results_of(op, *stack)), node);
  } else {
    torch::autograd::rebase_history(written, node);
  }
}

// Forward-mode differentiation of elementwise operators with their backward operators.

// A call's primals and tangents, kept apart.
struct Duals {
  Stack primals;
  // One per tensor argument; undefined without a tangent.
  variable_list tangents;
};

Duals split(const BackwardOperator& backward, Stack arguments) {
  Duals duals{std::move(arguments), {}};
  for (const size_t index : backward.tensor_arguments()) {
    IValue& argument = duals.primals[index];
    duals.tangents.emplace_back();
    if (!argument.isTensor()) continue;
    duals.tangents.back() = argument.toTensor()._fw_grad(/*level=*/0);
    argument = argument.toTensor()._fw_primal(/*level=*/0);
  }
  return duals;
}

// Let J be the derivative of a result by an argument: a number per element, or a 2 x 2 matrix if
// they are complex. For a gradient g, backward returns J^T g, which gives the rows of J for g = 1
// and g = i. So complex functions need not be holomorphic.
class PartialDerivatives {
 public:
  PartialDerivatives(const BackwardOperator& backward, const Duals& duals,
                     const std::vector<at::Tensor>& results)
      : backward_(backward),
        duals_(duals),
        results_(results),
        saved_(backward.saved(duals.primals, Stack(results.begin(), results.end()))) {
    for (const at::Tensor& tangent : duals.tangents) needed_.push_back(tangent.defined());
  }

  at::Tensor tangent_of(size_t result) const {
    const at::Tensor real_part = row(result, 1.0);
    if (!results_[result].is_complex()) return real_part;
    const c10::complex<double> i(0.0, 1.0);
    return at::add(real_part, at::mul(row(result, i), at::Scalar(i)));
  }

 private:
  at::Tensor row(size_t result, const at::Scalar& unit) const {
    variable_list gradients;
    for (const auto other : c10::irange(results_.size())) {
      if (!results_[other].defined()) {
        gradients.emplace_back();
        continue;
      }
      gradients.push_back(other == result ? at::full_like(results_[other], unit)
                                          : at::zeros_like(results_[other]));
    }
    const auto partial = backward_.gradients(gradients, saved_, needed_);
    at::Tensor sum;
    for (const auto edge : c10::irange(partial.size())) {
      if (!partial[edge].defined()) continue;
      const at::Tensor& tangent = duals_.tangents[edge];
      at::Tensor product = at::mul(at::conj(partial[edge]), tangent);
      if (product.is_complex()) product = at::real(product);
      sum = sum.defined() ? at::add(sum, product) : product;
    }
    return sum;
  }

  const BackwardOperator& backward_;
  const Duals& duals_;
  const std::vector<at::Tensor>& results_;
  SavedForBackward saved_;
  std::vector<bool> needed_;
};

// Calls an elementwise operator below autograd, records the call if an argument requires a
// gradient, and sets the tangents of the results.
void call_with_tangents(const std::shared_ptr<const BackwardOperator>& backward,
                        const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Duals duals = split(*backward, copy_arguments(op, *stack));
  if (needs_gradient(op, *stack)) {
    call_and_record(backward, op, keys, stack);
  } else {
    redispatch_below_autograd(op, keys, stack);
  }
  const auto results = tensors_of(results_of(op, *stack));
  const PartialDerivatives derivatives(*backward, duals, results);
  for (const auto i : c10::irange(results.size())) {
    if (!results[i].defined()) continue;
    const auto type = results[i].scalar_type();
    if (!at::isFloatingType(type) && !at::isComplexType(type)) continue;
    results[i]._set_fw_grad(derivatives.tangent_of(i).to(type), /*level=*/0,
                            /*is_inplace_op=*/false);
  }
}

constexpr auto kAutogradKeys = {c10::DispatchKey::AutogradCPU,
                                c10::DispatchKey::AutogradPrivateUse1,
                                c10::DispatchKey::AutogradMeta};

// PyTorch accepts None for any tensor argument.
void require_tensors(const OperatorHandle& op, const Stack& stack) {
  const auto& declared = op.schema().arguments();
  const auto given = arguments_of(op, stack);
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].isTensor() || given[i].toTensor().defined()) continue;
    TORCH_CHECK_TYPE(declared[i].type()->kind() == c10::TypeKind::OptionalType,
                     short_name(op.schema().name()), ": ", declared[i].name(),
                     " must be a Tensor, got None");
  }
}

using Action = std::function<void(const OperatorHandle&, DispatchKeySet, Stack*)>;

// Calls without gradients and tangents are redispatched below autograd at once.
class AutogradKernel final : public c10::OperatorKernel {
 public:
  AutogradKernel(Action with_gradient, Action with_tangent)
      : with_gradient_(std::move(with_gradient)), with_tangent_(std::move(with_tangent)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    require_tensors(op, *stack);
    if (has_tangent(op, *stack)) {
      with_tangent_(op, keys, stack);
    } else if (needs_gradient(op, *stack)) {
      with_gradient_(op, keys, stack);
    } else {
      redispatch_below_autograd(op, keys, stack);
    }
  }

 private:
  Action with_gradient_;
  Action with_tangent_;
};

// Without this, tangents would be dropped silently, as torch.library does for its operators.
void refuse_tangents(const OperatorHandle& op, DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      ": forward-mode differentiation is not implemented; to get it, pass a "
      "composite to foo_ops.library.register_autograd");
}

// Captures the kernel that the Autograd key has now.
Action registered_composite(const OperatorHandle& op, c10::DispatchKey key) {
  auto kernel = std::make_shared<c10::SafeKernelFunction>(op.getComputedKernelForDispatchKey(key));
  return [kernel](const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    kernel->callBoxed(op, keys, stack);
  };
}

void write_copy(const OperatorHandle& functional, const OperatorHandle& op, Stack* stack) {
  Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const at::Tensor target = arguments.front().toTensor();
  // The formula may keep its input, which is about to be overwritten.
  arguments.front() = target.clone();
  functional.callBoxed(&arguments);
  target.copy_(arguments.front().toTensor());
  stack->emplace_back(target);
}

[[noreturn]] void refuse_out(const OperatorHandle& op, DispatchKeySet, Stack*) {
  TORCH_CHECK(false, short_name(op.schema().name()),
              "(): functions with out=... arguments don't support automatic differentiation, but "
              "one of the arguments requires grad.");
}

// Prefers a kernel that others register for all devices, as torch.library.register_autograd does,
// to a refusal. The refusal is registered on the keys of devices, since the dispatcher would warn
// if one on the key of all devices were replaced.
Action unless_registered(const Action& refuse) {
  return [refuse](const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::Autograd)) {
      refuse(op, keys, stack);
      return;
    }
    kernel_of_autograd(op).callBoxed(op, keys, stack);
  };
}

template <class MakeKernel>
Registrations register_on_autograd_keys(const std::string& operator_name, const MakeKernel& make) {
  Registrations registrations;
  const auto op = find_operator(operator_name);
  for (const auto key : kAutogradKeys) {
    registrations.push_back(
        hold_kernel(operator_name, key, c10::KernelFunction::makeFromBoxedFunctor(make(op, key))));
  }
  return registrations;
}

class VersionCounting final : public c10::OperatorKernel {
 public:
  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const auto written = written_tensors(op, *stack);
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    for (const at::Tensor& tensor : written) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
};

}  // namespace

Registrations register_formula(const std::string& operator_name,
                               const std::shared_ptr<const Formula>& formula, Tangents tangents) {
  const Action record = [formula](const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    call_and_record_formula(formula, op, keys, stack);
  };
  return register_on_autograd_keys(operator_name, [&](const auto& op, auto key) {
    const bool has_composite = tangents == Tangents::kComposite;
    return std::make_unique<AutogradKernel>(
        record, has_composite ? registered_composite(op, key) : refuse_tangents);
  });
}

Registrations register_backward_operator(const std::string& operator_name,
                                         const std::string& backward_name, Tangents tangents) {
  const auto backward = std::make_shared<const BackwardOperator>(find_operator(operator_name),
                                                                 find_operator(backward_name));
  const Action push_forward = [backward](const OperatorHandle& op, DispatchKeySet keys,
                                         Stack* stack) {
    call_with_tangents(backward, op, keys, stack);
  };
  return register_on_autograd_keys(operator_name, [&](const auto& op, auto key) {
    const Action composite =
        tangents == Tangents::kComposite ? registered_composite(op, key) : Action();
    const Action with_gradient = [backward, composite](const OperatorHandle& op,
                                                       DispatchKeySet keys, Stack* stack) {
      const int64_t missing = backward->missing_gradient(arguments_of(op, *stack));
      if (missing < 0) {
        call_and_record(backward, op, keys, stack);
      } else if (composite) {
        composite(op, keys, stack);
      } else {
        TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": ", backward->name(),
                                    " returns no gradient for ",
                                    op.schema().arguments()[missing].name());
      }
    };
    Action with_tangent = composite ? composite : refuse_tangents;
    if (tangents == Tangents::kPartialDerivatives) with_tangent = push_forward;
    return std::make_unique<AutogradKernel>(with_gradient, with_tangent);
  });
}

Registrations refuse_to_differentiate(const std::string& operator_name,
                                      const std::string& message) {
  Action record = [message](const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    call_and_record_refusal(message, op, keys, stack);
  };
  Action refuse_with = [message](const OperatorHandle&, DispatchKeySet, Stack*) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, message);
  };
  const auto& arguments = find_operator(operator_name).schema().arguments();
  if (std::any_of(arguments.begin(), arguments.end(), [](const auto& it) { return it.is_out(); })) {
    record = refuse_with = refuse_out;
  }
  return register_on_autograd_keys(operator_name, [&](const auto&, auto) {
    return std::make_unique<AutogradKernel>(unless_registered(record),
                                            unless_registered(refuse_with));
  });
}

Registrations register_variant_autograd(const std::string& operator_name) {
  const bool is_out = operator_name.find('.') != std::string::npos;
  Action differentiate = refuse_out;
  if (!is_out) {
    const auto functional = find_operator(operator_name.substr(0, operator_name.size() - 1));
    differentiate = [functional](const OperatorHandle& op, DispatchKeySet, Stack* stack) {
      write_copy(functional, op, stack);
    };
  }
  return register_on_autograd_keys(operator_name, [&](const auto&, auto) {
    return std::make_unique<AutogradKernel>(differentiate, differentiate);
  });
}

c10::RegistrationHandleRAII count_versions(const std::string& operator_name) {
  return hold_kernel(
      operator_name, c10::DispatchKey::ADInplaceOrView,
      c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<VersionCounting>()));
}

}  // namespace foo
