// foo::linear_cross_entropy: its kernels' parameters and its checks, which fake kernels share.
// tests/project/test_agreement.py compares the struct with foo_ops/kernels/linear.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <utility>

#include "launch/kernel_table.h"
#include "ops/linear/product.h"

namespace foo {

// Logits are the product of left, whose rows are those of hidden, and right, whose columns are the
// rows of weight, plus a bias. Strides are in elements. Data with an element per row is contiguous;
// largest, total and logit_sum have an element per row for each split of the columns: the maximum,
// the sum of exp(logit - maximum), and that of logit - maximum, for label smoothing. For the first
// rows, exponentials are kept for the gradients: exp(logit - base) for each column, contiguous, and
// the base of each row in each block of block_columns columns.
struct CrossEntropy {
  int64_t rows, columns, depth, has_bias, ignore_index, split_columns, first_column;
  int64_t has_grad_loss, has_grad_logsumexp, kept_rows, block_columns;
  double softcap, softcap_inverse, label_smoothing, grad_mean_share;
  const void* left;
  int64_t left_row_stride, left_step_stride;
  const void* right;
  int64_t right_column_stride, right_step_stride;
  const void* bias;
  int64_t bias_column_stride;
  const int64_t* target;
  void *largest, *total, *logit_sum, *loss, *logsumexp;
  const void *grad_loss, *grad_logsumexp;
  void* grad_logits;
  int64_t grad_logits_row_stride;
  void *exponentials, *bases;
};

template <>
struct Layout<CrossEntropy> {
  using Struct = CrossEntropy;
  static constexpr const char* name = "CrossEntropy";
  static constexpr Field fields[] =
      FOO_FIELDS(rows, columns, depth, has_bias, ignore_index, split_columns, first_column,
                 has_grad_loss, has_grad_logsumexp, kept_rows, block_columns, softcap,
                 softcap_inverse, label_smoothing, grad_mean_share, left, left_row_stride,
                 left_step_stride, right, right_column_stride, right_step_stride, bias,
                 bias_column_stride, target, largest, total, logit_sum, loss, logsumexp, grad_loss,
                 grad_logsumexp, grad_logits, grad_logits_row_stride, exponentials, bases);
};
static_assert(is_whole<CrossEntropy>());

// If ``bytes`` is given, the kernel only writes there how much scratch memory a block needs.
using CrossEntropyFunction = void(const CrossEntropy* parameters, const ProductBlock* block,
                                  void* scratch, int64_t* bytes);

// Checks of the operators' arguments. They raise, and read only metadata.
void check_linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& target, const std::optional<at::Tensor>& bias,
                                double label_smoothing, double softcap);
void check_linear_cross_entropy_backward(
    const std::optional<at::Tensor>& grad_loss, const std::optional<at::Tensor>& grad_logsumexp,
    const std::optional<at::Tensor>& grad_mean, const at::Tensor& hidden, const at::Tensor& weight,
    const at::Tensor& target, const std::optional<at::Tensor>& bias, const at::Tensor& logsumexp,
    bool bias_requires_grad, double label_smoothing, double softcap);

// Columns per block; the logits of a block share a base. They fit the second-level cache together
// with their factors.
constexpr int64_t kLogitColumns = 256;

// Sizes of the data that foo::linear_cross_entropy_training keeps: rows of exponentials, and blocks
// per row that have a base.
using KeptSizes = std::pair<c10::SymInt, c10::SymInt>;

// Keeps no more exponentials than weight has elements, and none with a soft cap: its derivative
// does not follow from the exponentials.
KeptSizes kept_sizes(const c10::SymInt& rows, const c10::SymInt& depth, const c10::SymInt& columns,
                     double softcap);
void check_kept(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                const at::Tensor& exponentials, const at::Tensor& bases, double softcap);

}  // namespace foo
