#include "launch/backward_node.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cctype>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "launch/below_autograd.h"
#include "launch/registration.h"

namespace foo {

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::VariableInfo;
namespace compiled = torch::dynamo::autograd;

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
    for (const c10::IValue& number : numbers_) args.collect(number);
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
    for (const c10::IValue& number : now.numbers) packed.pack(number);
    packed.pack(now.is_complex);
    packed.pack(now.results);
    packed.pack(needed());
    const auto arguments = std::move(packed).vec();
    std::vector<at::TypePtr> schema;
    for (const c10::IValue& argument : arguments) {
      schema.push_back(argument.isTensor() ? at::TypePtr(at::TensorType::get()) : argument.type());
    }
    const auto& compiler = compiled::getPyCompilerInterface();
    const auto name = compiler->bind_function(
        swapped.get_py_compiler(), this->name(),
        [gradients = gradients_, count = numbers_.size()](const variable_list& of_results,
                                                          const std::vector<c10::IValue>& values) {
          compiled::PackedArgs unpacked(values);
          SavedForBackward saved;
          saved.tensors = unpacked.unpack<variable_list>();
          for ([[maybe_unused]] const auto i : c10::irange(count)) {
            saved.numbers.push_back(unpacked.unpack<c10::IValue>());
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
  std::vector<c10::IValue> numbers_;
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
variable_list tensors_in(c10::ArrayRef<c10::IValue> values) {
  variable_list tensors;
  for (const c10::IValue& value : values) {
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
variable_list tensors_at(c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<size_t> places) {
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

torch::jit::Stack copy_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return torch::jit::last(stack, op.schema().arguments().size()).vec();
}

auto results_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return torch::jit::last(stack, op.schema().returns().size());
}

KeptByFormula keep_without_recording(const Formula& formula, c10::ArrayRef<c10::IValue> arguments,
                                     c10::ArrayRef<c10::IValue> results) {
  const at::AutoGradMode no_gradients(false);
  const c10::AutoFwGradMode no_tangents(false);
  return formula.keep(arguments, results);
}

}  // namespace

void call_and_record(const std::shared_ptr<const BackwardOperator>& backward,
                     const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  auto node = c10::make_intrusive<BackwardNode>(backward);
  const auto arguments = copy_arguments(op, *stack);
  node->set_next_edges(edges_to(tensors_at(arguments, backward->tensor_arguments())));
  redispatch_below_autograd(op, keys, stack);
  const auto results = results_of(op, *stack);
  const auto tensors = tensors_of(results);
  record_results(tensors, node, backward->without_gradient(tensors));
  node->save(backward->saved(arguments, results));
}

void call_and_record_formula(const std::shared_ptr<const Formula>& formula,
                             const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack) {
  const auto arguments = copy_arguments(op, *stack);
  auto edges = edges_to(tensors_in(arguments));
  redispatch_below_autograd(op, keys, stack);
  const auto results = results_of(op, *stack);
  KeptByFormula kept = keep_without_recording(*formula, arguments, results);
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

void call_and_record_refusal(const std::string& message, const c10::OperatorHandle& op,
                             c10::DispatchKeySet keys, torch::jit::Stack* stack) {
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

}  // namespace foo
