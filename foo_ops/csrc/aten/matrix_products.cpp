// Matrix products on foo: aten::mm, addmm, addmv, bmm, baddbmm and the operators made of them.

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <limits>
#include <optional>

#include "aten/aten.h"
#include "aten/fallback.h"
#include "aten/operator_kinds.h"
#include "launch/registration.h"

namespace foo::aten {
namespace {

using at::Tensor;

std::atomic<bool> are_own_products = true;

// Operations per product of a batch from which on our kernel is faster than the CPU's, which packs
// several products at once. On one thread of a Zen 5, relative to the CPU's time, ours took: 512 x
// 64 x 512, 0.95 in float32, 1.27 in bfloat16; 128 x 64 x 128, 1.2 and 1.5; in float16, where torch
// has no vectorized product, 0.2.
int64_t least_work_in_batch(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return std::numeric_limits<int64_t>::max();
  return dtype == at::kHalf ? 1 << 17 : 1 << 24;
}

// Operands of beta * added + alpha * left @ right, two matrices or two batches of them.
struct Operands {
  // Undefined if nothing is added.
  Tensor added;
  Tensor left, right;
  c10::Scalar beta = 1, alpha = 1;
  // Undefined if the result is a new tensor.
  Tensor out;

  at::DimVector result_sizes() const {
    at::DimVector sizes(left.sizes());
    sizes.back() = right.size(-1);
    return sizes;
  }
};

// Rewrites the product of a matrix and a vector as a row times the transposed matrix.
void make_rows_of_vectors(Operands& operands) {
  const Tensor matrix = operands.left;
  operands.left = operands.right.unsqueeze(0);
  operands.right = matrix.t();
  if (operands.out.defined()) operands.out = operands.out.unsqueeze(0);
}

Operands operands_of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> values) {
  const auto& arguments = schema.arguments();
  Operands result;
  size_t next = 0;
  const bool has_added = values.size() >= 5;
  if (has_added) result.added = values[next++].toTensor();
  result.left = values[next++].toTensor();
  result.right = values[next++].toTensor();
  if (has_added) {
    result.beta = values[next++].toScalar();
    result.alpha = values[next++].toScalar();
  }
  if (is_written(arguments.front())) result.out = values.front().toTensor();
  if (is_written(arguments.back())) result.out = values.back().toTensor();
  return result;
}

bool is_dense_of(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.layout() == at::kStrided && tensor.scalar_type() == dtype;
}

bool have_fitting_sizes(const Operands& operands) {
  const Tensor &left = operands.left, &right = operands.right;
  const int64_t dimensions = left.dim();
  return (dimensions == 2 || dimensions == 3) && right.dim() == dimensions &&
         left.size(-1) == right.size(-2) && (dimensions == 2 || left.size(0) == right.size(0));
}

// Whether `out` can be written directly: it has the right sizes, and its memory overlaps neither
// itself nor the factors'.
bool is_writable(const Tensor& out, const Operands& operands) {
  return out.sizes() == at::IntArrayRef(operands.result_sizes()) &&
         at::has_internal_overlap(out) == at::MemOverlap::No && !out.is_alias_of(operands.left) &&
         !out.is_alias_of(operands.right);
}

bool is_real(const c10::Scalar& scalar) {
  return scalar.isFloatingPoint() || scalar.isIntegral(/*includeBool=*/false);
}

bool is_one(const c10::Scalar& scalar) {
  return scalar.toDouble() == 1.0;
}

bool is_added(const Operands& operands) {
  return operands.added.defined() && operands.beta.toDouble() != 0.0;
}

// Whether foo::linear can add `added` as its bias.
bool is_bias(const Operands& operands) {
  const Tensor& added = operands.added;
  const bool is_row = added.dim() <= 1 || (added.dim() == 2 && added.size(0) == 1);
  return operands.left.dim() == 2 && is_row && is_one(operands.beta) && is_one(operands.alpha);
}

bool is_rounded_once(const Operands& operands) {
  const bool is_only_product = !is_added(operands) && is_one(operands.alpha);
  return is_only_product || (is_added(operands) && is_bias(operands));
}

// Leaves invalid arguments to torch's own kernel, which has the error messages. Likewise half
// precision if more than a bias is added to a product: it would be rounded twice.
bool are_taken(const Operands& operands) {
  const auto dtype = operands.left.scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  if (dtype != at::kFloat && dtype != at::kDouble && !is_half) return false;
  if (!is_dense_of(operands.left, dtype) || !is_dense_of(operands.right, dtype)) return false;
  if (!have_fitting_sizes(operands)) return false;
  if (operands.added.defined() &&
      (!is_dense_of(operands.added, dtype) || !is_real(operands.beta) || !is_real(operands.alpha) ||
       !at::is_expandable_to(operands.added.sizes(), operands.result_sizes()))) {
    return false;
  }
  if (is_half && !is_rounded_once(operands)) return false;
  if (operands.left.dim() == 3 &&
      2 * operands.left.size(1) * operands.left.size(2) * operands.right.size(2) <
          least_work_in_batch(dtype)) {
    return false;
  }
  return !operands.out.defined() ||
         (is_dense_of(operands.out, dtype) && is_writable(operands.out, operands));
}

using Linear = Tensor(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias);

// Returns foo::linear, or nullopt if the launchers are not linked.
const std::optional<c10::OperatorHandle>& linear_operator() {
  static const auto known = c10::Dispatcher::singleton().findSchema({"foo::linear", ""});
  return known;
}

// Calls foo::linear's CPU kernel; also works in threads without this call's dispatch state.
Tensor product(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  static const auto kernel = linear_operator()->typed<Linear>();
  return kernel.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), input, weight, bias);
}

Tensor product_of_batch(const Operands& operands) {
  Tensor result = at::empty(operands.result_sizes(), operands.left.options());
  at::parallel_for(0, result.size(0), 1, [&](int64_t begin, int64_t end) {
    // Other threads do not inherit the state below autograd.
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (int64_t i = begin; i < end; ++i) {
      result.select(0, i).copy_(
          product(operands.left.select(0, i), operands.right.select(0, i).t(), std::nullopt));
    }
  });
  return result;
}

Tensor compute(const Operands& operands) {
  const bool has_added = is_added(operands);
  if (operands.left.dim() == 2 && has_added && is_bias(operands)) {
    const Tensor& added = operands.added;
    const Tensor row = added.dim() == 2 ? added.select(0, 0) : added;
    return product(operands.left, operands.right.t(), row.expand({operands.right.size(1)}));
  }
  Tensor result = operands.left.dim() == 2
                      ? product(operands.left, operands.right.t(), std::nullopt)
                      : product_of_batch(operands);
  if (!is_one(operands.alpha)) result.mul_(operands.alpha);
  if (has_added) result.add_(operands.added, operands.beta);
  return result;
}

bool multiply_on_host(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (!has_own_products() || !linear_operator()) return false;
  const size_t count = op.schema().arguments().size();
  Operands operands = operands_of(op.schema(), torch::jit::last(stack, count));
  const Tensor out = operands.out;
  const bool is_vector = operands.right.dim() == 1 && operands.left.dim() == 2;
  if (is_vector) make_rows_of_vectors(operands);
  if (!are_taken(operands)) return false;
  Tensor result = compute(operands);
  if (is_vector) result = result.squeeze(0);
  if (out.defined()) out.copy_(result);
  torch::jit::drop(stack, count);
  stack.emplace_back(out.defined() ? out : result);
  return true;
}

void multiply(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  call_on_host(op, keys, stack, &multiply_on_host);
}

}  // namespace

bool has_own_products() {
  return are_own_products.load(std::memory_order_relaxed);
}

void set_own_products(bool are_own) {
  are_own_products.store(are_own, std::memory_order_relaxed);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm_", "addmm.out",
                           "baddbmm", "baddbmm_", "baddbmm.out", "addmv", "addmv_", "addmv.out"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&multiply>());
  }
}

}  // namespace foo::aten
