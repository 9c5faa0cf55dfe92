#include "launch/backward_node.h"

#include <c10/util/irange.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <cctype>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "launch/autograd.h"
#include "launch/registration.h"

namespace foo {

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::VariableInfo;
namespace compiled = torch::dynamo::autograd;

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

class BackwardNode final : public torch::autograd::Node {
 public:
  explicit BackwardNode(std::shared_ptr<const BackwardOperator> backward)
      : backward_(std::move(backward)) {}

  void save(c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results) {
    backward_->save(
        arguments, results,
        [this](const at::Tensor& tensor, bool is_result) {
          // A result would hold its own node, which holds the result.
          tensors_.emplace_back(tensor, is_result);
          is_result_.push_back(is_result);
        },
        [this](const c10::IValue& number) { numbers_.push_back(number); });
    for (const size_t index : backward_->tensor_arguments()) {
      is_complex_.push_back(arguments[index].isTensor() &&
                            arguments[index].toTensor().is_complex());
    }
    if (results.size() == 1) return;
    for (const c10::IValue& result : results) results_.emplace_back(result.toTensor());
  }

  variable_list apply(variable_list&& gradients) override {
    return backward_->gradients(gradients, saved(), needed());
  }

  std::string name() const override { return node_name(backward_->name()); }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& tensor : tensors_) tensor.reset_data();
  }

  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    args.collect(backward_->name());
    for (const auto i : c10::irange(tensors_.size())) args.collect(tensors_[i], is_result_[i]);
    for (const c10::IValue& number : numbers_) args.collect(number);
    args.collect(is_complex_);
    args.collect(results_);
  }

  variable_list apply_with_saved(const variable_list& gradients,
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
        [backward = backward_, count = numbers_.size()](const variable_list& of_results,
                                                        const std::vector<c10::IValue>& values) {
          compiled::PackedArgs unpacked(values);
          SavedForBackward saved;
          saved.tensors = unpacked.unpack<variable_list>();
          for ([[maybe_unused]] const auto i : c10::irange(count)) {
            saved.numbers.push_back(unpacked.unpack<c10::IValue>());
          }
          saved.is_complex = unpacked.unpack<std::vector<bool>>();
          saved.results = unpacked.unpack<std::vector<VariableInfo>>();
          return backward->gradients(of_results, saved, unpacked.unpack<std::vector<bool>>());
        },
        schema, /*is_custom_function=*/false, /*is_traceable=*/true);
    const auto metadata =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    auto found = compiler->call_function(swapped.get_py_compiler(), "apply_functional", name,
                                         gradients, arguments, metadata);
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

  std::shared_ptr<const BackwardOperator> backward_;
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

// The edges to the arguments' nodes, or to none.
torch::autograd::edge_list edges_to(c10::ArrayRef<c10::IValue> arguments,
                                    c10::ArrayRef<size_t> tensors) {
  torch::autograd::edge_list edges;
  edges.reserve(tensors.size());
  for (const size_t index : tensors) {
    edges.push_back(arguments[index].isTensor()
                        ? torch::autograd::impl::gradient_edge(arguments[index].toTensor())
                        : torch::autograd::Edge());
  }
  return edges;
}

void set_history(c10::ArrayRef<c10::IValue> results,
                 const c10::intrusive_ptr<torch::autograd::Node>& node) {
  for (const c10::IValue& result : results) {
    const at::Tensor& tensor = result.toTensor();
    if (torch::autograd::isDifferentiableType(tensor.scalar_type())) {
      torch::autograd::set_history(tensor, node);
    } else {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    }
  }
}

}  // namespace

void call_and_record(const std::shared_ptr<const BackwardOperator>& backward,
                     const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  auto node = c10::make_intrusive<BackwardNode>(backward);
  const torch::jit::Stack arguments =
      torch::jit::last(*stack, op.schema().arguments().size()).vec();
  node->set_next_edges(edges_to(arguments, backward->tensor_arguments()));
  redispatch_below_autograd(op, keys, stack);
  const auto results = torch::jit::last(*stack, op.schema().returns().size());
  set_history(results, node);
  // Results are saved with their history.
  node->save(arguments, results);
}

void call_and_record_refusal(const std::string& message, const c10::OperatorHandle& op,
                             c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto node = c10::make_intrusive<RefusingNode>(message);
  torch::autograd::edge_list edges;
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor()) {
      edges.push_back(torch::autograd::impl::gradient_edge(argument.toTensor()));
    }
  }
  node->set_next_edges(std::move(edges));
  redispatch_below_autograd(op, keys, stack);
  set_history(torch::jit::last(*stack, op.schema().returns().size()), node);
}

}  // namespace foo
