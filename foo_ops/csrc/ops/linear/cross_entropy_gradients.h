// The products of the gradients of logits, some classes at a time.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "launch/huge_pages.h"
#include "ops/linear/product.h"

namespace foo {

inline at::ScalarType compute_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// The dtype of gradients of logits, and of what they are multiplied by. In float16 they would be
// too small, and its products are of float32 anyway.
inline at::ScalarType factor_type(at::ScalarType dtype) {
  return dtype == at::kHalf ? at::kFloat : dtype;
}

// What the gradients of logits are multiplied by and added to.
class Gradients {
 public:
  Gradients(const at::Tensor& hidden, const at::Tensor& weight, bool hidden_requires_grad,
            bool weight_requires_grad, bool bias_requires_grad)
      : weight_(weight), factors_(factor_type(hidden.scalar_type())) {
    const auto options = hidden.options();
    if (hidden_requires_grad) {
      hidden_sums_ = at::zeros(hidden.sizes(), options.dtype(compute_type(hidden.scalar_type())));
    }
    if (weight_requires_grad) {
      hidden_ = hidden.to(factors_);
      grad_weight_ = new_tensor(weight.sizes(), options);
    }
    if (bias_requires_grad) {
      one_ = at::ones({1}, options.dtype(factors_));
      grad_bias_ = at::empty({weight.size(0)}, options);
    }
  }

  // Takes the gradients of the logits of some classes, which are all rows by so many columns.
  void add(const at::Tensor& grad_logits, int64_t start, int64_t count) {
    const Matrix grad(grad_logits);
    if (hidden_sums_.defined()) {
      const Matrix weight(weight_.narrow(0, start, count).to(factors_));
      add_product(hidden_sums_, grad, weight.transposed());
    }
    if (grad_weight_.defined()) {
      store(grad_weight_.narrow(0, start, count), grad.transposed(), Matrix(hidden_).transposed());
    }
    if (grad_bias_.defined()) {
      store(grad_bias_.narrow(0, start, count), Matrix(one_, grad.rows()), grad.transposed());
    }
  }

  std::tuple<at::Tensor, at::Tensor, at::Tensor> results() const {
    const auto none = [&] { return at::empty({0}, weight_.options()); };
    return {hidden_sums_.defined() ? hidden_sums_.to(weight_.scalar_type()) : none(),
            grad_weight_.defined() ? grad_weight_ : none(),
            grad_bias_.defined() ? grad_bias_ : none()};
  }

 private:
  void store(const at::Tensor& output, const Matrix& left, const Matrix& right) const {
    if (output.scalar_type() == factors_) {
      multiply(output, left, right);
    } else {
      const at::Tensor wide = at::empty(output.sizes(), output.options().dtype(factors_));
      multiply(wide, left, right);
      output.copy_(wide);
    }
  }

  at::Tensor weight_, hidden_, one_;
  at::Tensor hidden_sums_, grad_weight_, grad_bias_;
  at::ScalarType factors_;
};

}  // namespace foo
