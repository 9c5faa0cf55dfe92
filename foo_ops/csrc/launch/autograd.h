// Gradients and tangents of operators: kernels on their autograd keys, registered by the
// operators' names, the nodes that these kernels add to autograd's graph, and the operators and
// formulas that compute gradients.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/autograd/variable_info.h>

#include <memory>
#include <string>
#include <vector>

#include "launch/registration.h"

namespace foo {

// The operator's arguments, on top of the stack.
inline c10::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op,
                                               const torch::jit::Stack& stack) {
  return torch::jit::last(stack, op.schema().arguments().size());
}

// Whether gradients are recorded and one of the operator's arguments requires one.
bool needs_gradient(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Whether one of the operator's arguments has a tangent of forward-mode differentiation.
bool has_tangent(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns the arguments that an operator writes, without inference tensors.
std::vector<at::Tensor> written_tensors(const c10::OperatorHandle& op,
                                        const torch::jit::Stack& stack);

// Calls the operator's kernel for the first of these keys below autograd.
void redispatch_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                               torch::jit::Stack* stack);

// Gradients of recorded calls, computed by backward operators or formulas.

// Data that a call saves for its backward pass.
struct SavedForBackward {
  // Undefined where an argument was None or is not needed.
  torch::autograd::variable_list tensors;
  torch::jit::Stack numbers;
  // For each tensor argument, whether it is complex.
  std::vector<bool> is_complex;
  // Describes the zeros that replace a missing gradient; empty if none do.
  std::vector<torch::autograd::VariableInfo> results;
};

// Describes the zeros that replace a result's missing gradient. Beside a Python tensor subclass,
// such as a DTensor, they must be of that class, too.
inline torch::autograd::VariableInfo zeros_like_result(const at::Tensor& result) {
  return torch::autograd::VariableInfo(result, result.key_set().has(c10::DispatchKey::Python));
}

// Returns the results as tensors, undefined for missing ones.
inline torch::autograd::variable_list tensors_of(c10::ArrayRef<c10::IValue> results) {
  torch::autograd::variable_list tensors;
  tensors.reserve(results.size());
  for (const c10::IValue& result : results) {
    tensors.push_back(result.isTensor() ? result.toTensor() : at::Tensor());
  }
  return tensors;
}

class Gradients {
 public:
  virtual ~Gradients() = default;

  // Ends with "_backward".
  virtual const std::string& name() const = 0;

  // Equal for calls that differ only in what they saved.
  virtual std::string key() const = 0;

  // Returns the gradients of the tensor arguments, undefined if not needed. At least one result has
  // a gradient.
  virtual torch::autograd::variable_list gradients(const torch::autograd::variable_list& of_results,
                                                   const SavedForBackward& saved,
                                                   const std::vector<bool>& needed) const = 0;
};

// Data that a call with a formula saves for its backward pass.
struct KeptByFormula {
  std::shared_ptr<const Gradients> gradients;
  torch::autograd::variable_list saved_tensors;
  torch::autograd::variable_list non_differentiable;
  // Whether zeros replace missing gradients.
  bool materializes_gradients;
};

class Formula {
 public:
  virtual ~Formula() = default;

  // Called while no gradients are recorded. `gradients` counts the tensors of lists one by one.
  virtual KeptByFormula keep(const c10::FunctionSchema& schema,
                             c10::ArrayRef<c10::IValue> arguments,
                             c10::ArrayRef<c10::IValue> results) const = 0;
};

// An operator `f_backward` that computes the gradients of `f`. The argument names in its schema say
// what it takes:
//
//   query                  an argument of f
//   output                 a result of f
//   grad_output            the gradient of a result of f; if results have no names, every other
//                          name takes the next result's gradient
//   query_requires_grad    whether an argument of f needs a gradient, a bool
//
// A result that may be missing is Tensor?, and so is its gradient: None where the result is. A
// result whose gradient f_backward does not take has none: statistics that are kept for f_backward,
// for example.
//
// The results of f_backward are grad_query and so on, or grad_key_and_value for two equal ones;
// other results are ignored. Without names there is one for each tensor argument of f. An optional
// gradient argument is None if nothing depends on that result; other gradients are zeros then. A
// tensor that is optional in f_backward but not in f is a factor of the other arguments' gradients:
// it is saved if one of those is needed.
class BackwardOperator final : public Gradients {
 public:
  // Throws a TypeError if a name or a type does not fit.
  BackwardOperator(const c10::OperatorHandle& op, const c10::OperatorHandle& backward);

  const std::string& name() const override { return name_; }
  std::string key() const override { return name_; }

  // Indices of the tensors among the arguments of f; each has an edge of the graph.
  const std::vector<size_t>& tensor_arguments() const { return tensor_arguments_; }

  // Saves the data for the backward pass.
  SavedForBackward saved(c10::ArrayRef<c10::IValue> arguments,
                         c10::ArrayRef<c10::IValue> results) const;

  // Returns the results of a call whose gradients f_backward does not take.
  torch::autograd::variable_list without_gradient(
      const torch::autograd::variable_list& results) const;

  // Returns an argument that requires a gradient which f_backward does not return, or -1.
  int64_t missing_gradient(c10::ArrayRef<c10::IValue> arguments) const;

  torch::autograd::variable_list gradients(const torch::autograd::variable_list& of_results,
                                           const SavedForBackward& saved,
                                           const std::vector<bool>& needed) const override;

 private:
  struct Source {
    enum Kind { kTensor, kNumber, kResult, kGradient, kRequiresGrad } kind;
    // Index of the argument, result or edge.
    size_t index;
    bool is_optional;
    bool is_factor;
  };

  Source source_of(const c10::Argument& argument, const c10::FunctionSchema& schema,
                   size_t& next_gradient) const;
  size_t edge_of(size_t argument) const;
  void find_results(const c10::FunctionSchema& schema, const std::vector<c10::Argument>& results);
  bool another_requires_grad(c10::ArrayRef<c10::IValue> arguments, size_t index) const;

  c10::OperatorHandle backward_;
  std::string name_;
  std::vector<size_t> tensor_arguments_;
  std::vector<Source> sources_;
  // For each edge, the index of f_backward's result that goes there, or -1.
  std::vector<int64_t> results_;
};

// Gradients and tangents of operators: kernels on their autograd keys, registered by the operators'
// names, and the nodes that these kernels add to autograd's graph.

// Source of an operator's forward-mode tangents.
enum class Tangents {
  // The backward operator gives the partial derivatives: for elementwise operators.
  kPartialDerivatives,
  // A Python function on the Autograd key computes the result with PyTorch's own operators.
  kComposite,
  kNotImplemented,
};

// Computes an operator's gradients with another operator, see BackwardOperator.
Registrations register_backward_operator(const std::string& operator_name,
                                         const std::string& backward_name, Tangents tangents);

// Computes an operator's gradients with a formula. Tangents are kComposite or kNotImplemented.
Registrations register_formula(const std::string& operator_name,
                               const std::shared_ptr<const Formula>& formula, Tangents tangents);

// Allows calls while gradients are recorded, but throws `message` as a NotImplementedError when a
// gradient or a tangent passes through the operator, unless there is a kernel on the Autograd key
// by then.
Registrations refuse_to_differentiate(const std::string& operator_name, const std::string& message);

// Differentiates `f_` as `self.copy_(f(self.clone()))`, which handles views and versions, and makes
// `f.out` refuse arguments that require a gradient, as PyTorch's own do.
Registrations register_variant_autograd(const std::string& operator_name);

// Bumps the versions of the arguments that an operator writes, so that autograd notices.
c10::RegistrationHandleRAII count_versions(const std::string& operator_name);

}  // namespace foo
