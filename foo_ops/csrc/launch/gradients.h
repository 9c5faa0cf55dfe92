// What computes the gradients of recorded calls: backward operators, and formulas.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/autograd/variable_info.h>

#include <memory>
#include <string>
#include <vector>

namespace foo {

// What computes the gradients of recorded calls: backward operators and formulas.

// What a call of an operator leaves for its backward pass.
struct SavedForBackward {
  // Undefined where an argument was None or is not needed.
  torch::autograd::variable_list tensors;
  torch::jit::Stack numbers;
  // For each tensor among the arguments whether it is of complex numbers.
  std::vector<bool> is_complex;
  // What zeros stand for a gradient that is missing; empty where none do.
  std::vector<torch::autograd::VariableInfo> results;
};

// Says what zeros stand for a result's gradient. Beside a tensor of Python's, such as a DTensor,
// they must be one of these, too.
inline torch::autograd::VariableInfo zeros_like_result(const at::Tensor& result) {
  return torch::autograd::VariableInfo(result, result.key_set().has(c10::DispatchKey::Python));
}

// The tensors that results are, undefined for those that are not there.
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

  // Is the same for calls that differ only in what they saved.
  virtual std::string key() const = 0;

  // The gradients of the tensors among the arguments, undefined for those that are not needed. Of
  // the results at least one has a gradient.
  virtual torch::autograd::variable_list gradients(const torch::autograd::variable_list& of_results,
                                                   const SavedForBackward& saved,
                                                   const std::vector<bool>& needed) const = 0;
};

// Gradients that a function computes which is no operator.

// What a call leaves for its backward pass.
struct KeptByFormula {
  std::shared_ptr<const Gradients> gradients;
  torch::autograd::variable_list saved_tensors;
  torch::autograd::variable_list non_differentiable;
  // Whether zeros stand for gradients that are missing.
  bool materializes_gradients;
};

class Formula {
 public:
  virtual ~Formula() = default;

  // Called where no gradients are recorded. `gradients` counts the tensors of lists one by one.
  virtual KeptByFormula keep(c10::ArrayRef<c10::IValue> arguments,
                             c10::ArrayRef<c10::IValue> results) const = 0;
};

// An operator that computes the gradients of another one: how the two belong together.

// An operator `f_backward` beside `f`. The names in the schemas say what its arguments are:
//
//   query                  an argument of f
//   output                 a result of f
//   grad_output            the gradient of a result of f; where results have no names, any other
//   name
//                          is that of the next one's
//   query_requires_grad    whether an argument of f needs a gradient, a bool
//
// A result that may be missing is Tensor?, and so is its gradient: None where the result is. A
// result whose gradient f_backward does not take, such as statistics that are kept for it, has
// none.
//
// Its results are grad_query and so on, grad_key_and_value for two that are the same, and others
// that are not looked at; where they have no names, there is one for each tensor. A gradient that
// is optional is None where nothing depends on that result, else it is zeros. A tensor that is
// optional here and not in f is a factor of the others' gradients: it is saved where one of those
// is needed.
class BackwardOperator final : public Gradients {
 public:
  // Throws a TypeError where a name or a type does not fit.
  BackwardOperator(const c10::OperatorHandle& op, const c10::OperatorHandle& backward);

  const std::string& name() const override { return name_; }
  std::string key() const override { return name_; }

  // Where the tensors stand among the arguments of f: each has an edge of the graph.
  const std::vector<size_t>& tensor_arguments() const { return tensor_arguments_; }

  // What a call leaves for its backward pass.
  SavedForBackward saved(c10::ArrayRef<c10::IValue> arguments,
                         c10::ArrayRef<c10::IValue> results) const;

  // Those of a call's results whose gradients f_backward does not take.
  torch::autograd::variable_list without_gradient(
      const torch::autograd::variable_list& results) const;

  // An argument that requires a gradient which f_backward does not return, or -1.
  int64_t missing_gradient(c10::ArrayRef<c10::IValue> arguments) const;

  torch::autograd::variable_list gradients(const torch::autograd::variable_list& of_results,
                                           const SavedForBackward& saved,
                                           const std::vector<bool>& needed) const override;

 private:
  struct Source {
    enum Kind { kTensor, kNumber, kResult, kGradient, kRequiresGrad } kind;
    // Of the argument or the result.
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
  // For each edge the result of f_backward that goes there, or -1.
  std::vector<int64_t> results_;
};

}  // namespace foo
