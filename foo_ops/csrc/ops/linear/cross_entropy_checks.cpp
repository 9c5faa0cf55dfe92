#include <c10/util/Exception.h>

#include <cmath>

#include "launch/kernel_table.h"
#include "launch/symbols.h"
#include "ops/linear/checks.h"
#include "ops/linear/cross_entropy.h"

namespace foo {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_device(const char* name, const char* argument, const at::Tensor& tensor,
                  const at::Tensor& hidden) {
  TORCH_CHECK_VALUE(tensor.device() == hidden.device(), name, ": ", argument, " must be on ",
                    hidden.device(), " as hidden is, got ", tensor.device());
}

void check_shape(const char* name, const char* argument, const at::Tensor& tensor,
                 c10::SymIntArrayRef sizes, const char* reason) {
  TORCH_CHECK_VALUE(have_sizes(tensor.sym_sizes(), sizes), name, ": ", argument,
                    " must have shape ", sizes, " ", reason, ", got ", tensor.sym_sizes());
}

void check(const char* name, const at::Tensor& hidden, const at::Tensor& weight,
           const at::Tensor& target, const OptionalTensor& bias, double label_smoothing,
           double softcap) {
  check_dtype(name, "hidden", hidden);
  check_rows(name, "hidden", hidden);
  check_dimensions(name, "weight", weight, 2, "(V, K)");
  check_like(name, "weight", weight, "hidden", hidden);
  check_count(name, "weight", "columns", weight.sym_size(1), hidden.sym_size(-1), "hidden has");
  check_device(name, "target", target, hidden);
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, name, ": target must be int64, got ",
                   dtype_name(target.scalar_type()));
  check_shape(name, "target", target, hidden.sym_sizes().slice(0, hidden.dim() - 1),
              "as hidden has rows");
  if (bias.has_value()) {
    check_dimensions(name, "bias", *bias, 1, "(V)");
    check_like(name, "bias", *bias, "hidden", hidden);
    check_count(name, "bias", "elements", bias->sym_size(0), weight.sym_size(0), "weight has rows");
  }
  TORCH_CHECK_VALUE(0.0 <= label_smoothing && label_smoothing <= 1.0, name,
                    ": label_smoothing must be in [0, 1], got ", label_smoothing);
  TORCH_CHECK_VALUE(softcap >= 0.0 && std::isfinite(softcap), name,
                    ": softcap must be positive and finite, or 0 for none, got ", softcap);
}

void check_sum(const char* name, const char* argument, const at::Tensor& tensor,
               c10::SymIntArrayRef sizes, const char* reason, const at::Tensor& hidden) {
  const auto dtype = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  check_device(name, argument, tensor, hidden);
  check_shape(name, argument, tensor, sizes, reason);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, ": ", argument, " must be ",
                   dtype_name(dtype), " where hidden is ", dtype_name(hidden.scalar_type()),
                   ", got ", dtype_name(tensor.scalar_type()));
}

}  // namespace

void check_linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& target, const OptionalTensor& bias,
                                double label_smoothing, double softcap) {
  check("linear_cross_entropy", hidden, weight, target, bias, label_smoothing, softcap);
}

void check_linear_cross_entropy_backward(const OptionalTensor& grad_loss,
                                         const OptionalTensor& grad_logsumexp,
                                         const OptionalTensor& grad_mean, const at::Tensor& hidden,
                                         const at::Tensor& weight, const at::Tensor& target,
                                         const OptionalTensor& bias, const at::Tensor& logsumexp,
                                         bool bias_requires_grad, double label_smoothing,
                                         double softcap) {
  const char* const name = "linear_cross_entropy_backward";
  check(name, hidden, weight, target, bias, label_smoothing, softcap);
  const auto rows = target.sym_sizes();
  if (grad_loss.has_value()) {
    check_sum(name, "grad_loss", *grad_loss, rows, "as target has", hidden);
  }
  if (grad_logsumexp.has_value()) {
    check_sum(name, "grad_logsumexp", *grad_logsumexp, rows, "as target has", hidden);
  }
  if (grad_mean.has_value()) {
    check_sum(name, "grad_mean", *grad_mean, {}, "as mean has", hidden);
  }
  check_sum(name, "logsumexp", logsumexp, rows, "as target has", hidden);
  TORCH_CHECK_VALUE(bias.has_value() || !bias_requires_grad, name,
                    ": bias must be given where bias_requires_grad is true, got None");
}

KeptSizes kept_sizes(const c10::SymInt& rows, const c10::SymInt& depth, const c10::SymInt& columns,
                     double softcap) {
  return {softcap > 0.0 ? c10::SymInt(0) : rows.min(depth),
          (columns + kLogitColumns - 1) / kLogitColumns};
}

void check_kept(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                const at::Tensor& exponentials, const at::Tensor& bases, double softcap) {
  const char* const name = "linear_cross_entropy_training_backward";
  const auto [most, blocks] =
      kept_sizes(target.sym_numel(), weight.sym_size(1), weight.sym_size(0), softcap);
  check_device(name, "exponentials", exponentials, hidden);
  check_dimensions(name, "exponentials", exponentials, 2, "(rows, V)");
  const c10::SymInt rows = exponentials.sym_size(0);
  TORCH_CHECK_VALUE(holds(rows.sym_le(most)), name, ": exponentials must have at most ", most,
                    " rows, got ", rows);
  check_count(name, "exponentials", "columns", exponentials.sym_size(1), weight.sym_size(0),
              "weight has rows");
  const auto dtype = hidden.scalar_type() == at::kHalf ? at::kFloat : hidden.scalar_type();
  TORCH_CHECK_TYPE(exponentials.scalar_type() == dtype, name, ": exponentials must be ",
                   dtype_name(dtype), " where hidden is ", dtype_name(hidden.scalar_type()),
                   ", got ", dtype_name(exponentials.scalar_type()));
  const c10::SymInt of_bases[] = {blocks, rows};
  check_sum(name, "bases", bases, of_bases, "as exponentials have blocks of columns and rows",
            hidden);
}

}  // namespace foo
