#include "launch/forward_mode.h"

#include <ATen/ops/add.h>
#include <ATen/ops/conj.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/complex.h>
#include <c10/util/irange.h>

#include <utility>
#include <vector>

#include "launch/backward_node.h"
#include "launch/below_autograd.h"

namespace foo {

namespace {

using torch::autograd::variable_list;
using torch::jit::Stack;

// A call's primals and tangents, kept apart.
struct Duals {
  Stack primals;
  // One per tensor argument; undefined without a tangent.
  variable_list tangents;
};

Duals split(const BackwardOperator& backward, Stack arguments) {
  Duals duals{std::move(arguments), {}};
  for (const size_t index : backward.tensor_arguments()) {
    c10::IValue& argument = duals.primals[index];
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

}  // namespace

void call_with_tangents(const std::shared_ptr<const BackwardOperator>& backward,
                        const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Duals duals =
      split(*backward, torch::jit::last(*stack, op.schema().arguments().size()).vec());
  if (needs_gradient(op, *stack)) {
    call_and_record(backward, op, keys, stack);
  } else {
    redispatch_below_autograd(op, keys, stack);
  }
  const auto results = tensors_of(torch::jit::last(*stack, op.schema().returns().size()));
  const PartialDerivatives derivatives(*backward, duals, results);
  for (const auto i : c10::irange(results.size())) {
    if (!results[i].defined()) continue;
    const auto type = results[i].scalar_type();
    if (!at::isFloatingType(type) && !at::isComplexType(type)) continue;
    results[i]._set_fw_grad(derivatives.tangent_of(i).to(type), /*level=*/0,
                            /*is_inplace_op=*/false);
  }
}

}  // namespace foo
