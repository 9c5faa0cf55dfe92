#include "ops/attention/bias_gradient.h"

#include <ATen/ops/zeros.h>

#include "launch/huge_pages.h"

namespace foo {

at::Tensor sum_in_order(const at::Tensor& tensor, int64_t dim) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[dim] = 1;
  const at::Tensor total = at::zeros(sizes, tensor.options().dtype(at::kDouble));
  for (int64_t index = 0; index < tensor.size(dim); ++index) {
    total.add_(tensor.narrow(dim, index, 1));
  }
  return total;
}

BiasGradient::BiasGradient(Parameters& parameters, const at::Tensor& bias,
                           at::ScalarType compute_type)
    : parameters_(parameters), bias_(bias), compute_type_(compute_type), sizes_(4 - bias.dim(), 1) {
  sizes_.insert(sizes_.end(), bias.sizes().begin(), bias.sizes().end());
  const bool has_all_heads = sizes_[0] == parameters.batch && sizes_[1] == parameters.query_heads;
  const bool has_tiles = sizes_[2] == parameters.query_length && sizes_[3] == parameters.key_length;
  const bool is_stored = has_all_heads && has_tiles && parameters.bias_kind == kOfQueryDtype;
  parameters.bias_gradient = is_stored ? kStored : kAdded;
  is_shared_ = !has_all_heads && sizes_[2] != 1 && sizes_[3] != 1;
}

SharedSums BiasGradient::sharing() const {
  return {.batch = is_shared_ && sizes_[0] == 1, .heads = is_shared_ && sizes_[1] == 1};
}

void BiasGradient::allocate(int64_t slots, bool all_keys_are_seen) {
  const auto own = bias_.options(), sums = own.dtype(compute_type_);
  const auto lengths = at::IntArrayRef(sizes_).slice(2);
  if (parameters_.bias_gradient == kStored) {
    sums_ = new_tensor(sizes_, own);
    if (!all_keys_are_seen) sums_.zero_();
  } else if (has_row_sums()) {
    sums_ = at::zeros(
        {parameters_.batch * parameters_.key_heads * slots, parameters_.group, 1, lengths[1]},
        sums.device(at::kCPU));
  } else if (lengths[1] == 1) {
    sums_ = at::zeros({parameters_.batch, parameters_.query_heads, lengths[0], 1},
                      sums.device(at::kCPU));
  } else {
    sums_ = at::zeros(sizes_, sums);
  }
  parameters_.grad_attn_bias = Operand(sums_);
  for (int64_t axis = 0; axis < 4; ++axis) {
    if (sums_.size(axis) == 1) {
      parameters_.grad_attn_bias.strides[axis] = 0;
    }
  }
}

int64_t BiasGradient::place_of(const Piece& block) const {
  const auto& strides = parameters_.grad_attn_bias.strides;
  if (has_row_sums()) {
    return block.slot * strides[0] + block.head % parameters_.group * strides[1];
  }
  return block.batch * strides[0] + block.head * strides[1] + block.query_start * strides[2];
}

at::Tensor BiasGradient::total() const {
  at::Tensor result = sums_;
  if (has_row_sums()) {
    const int64_t heads = parameters_.batch * parameters_.key_heads;
    const int64_t slots = heads == 0 ? 0 : sums_.size(0) / heads;
    result = sum_in_order(sums_.view({heads, slots, parameters_.group, sizes_[3]}), 1)
                 .view({parameters_.batch, parameters_.query_heads, 1, sizes_[3]});
  }
  for (int64_t dim = 0; dim < 2; ++dim) {
    if (sizes_[dim] == 1 && result.size(dim) != 1) {
      result = sum_in_order(result, dim);
    }
  }
  return result.view(bias_.sizes()).to(bias_.options());
}

}  // namespace foo
