// What computes the gradients of recorded calls: backward operators and formulas.

#pragma once

#include <ATen/core/stack.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/autograd/variable_info.h>

#include <string>
#include <vector>

namespace foo {

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

}  // namespace foo
