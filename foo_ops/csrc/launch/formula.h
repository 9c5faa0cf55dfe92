// Gradients that a function computes which is no operator.

#pragma once

#include <ATen/core/ivalue.h>

#include <memory>

#include "launch/gradients.h"

namespace foo {

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

}  // namespace foo
