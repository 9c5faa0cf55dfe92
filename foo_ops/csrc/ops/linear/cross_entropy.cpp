#include "ops/linear/cross_entropy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "launch/jobs.h"
#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "launch/registration.h"
#include "launch/symbols.h"
#include "ops/linear/linear.h"
#include "ops/linear/product.h"

namespace foo {

namespace {

at::ScalarType compute_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// Returns the dtype of logits' gradients and of their factors. float16 would underflow, and its
// products are computed in float32 anyway.
at::ScalarType factor_type(at::ScalarType dtype) {
  return dtype == at::kHalf ? at::kFloat : dtype;
}

// Accumulates the gradients of hidden, weight and bias from the gradients of logits, which come in
// chunks of classes.
class LogitGradients {
 public:
  LogitGradients(const at::Tensor& hidden, const at::Tensor& weight, bool hidden_requires_grad,
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

  // Adds the gradients of the logits of `count` classes from `start` on, for all rows.
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

using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kLogitTile = 64;
// Most splits of the classes: each needs three numbers per row.
constexpr int64_t kMostSplits = 64;
// Fewest jobs that keep the threads busy, if there are enough rows.
constexpr int64_t kJobs = 16;
// Most classes whose logits' gradients are in memory at a time.
constexpr int64_t kChunk = 2048;
// Elements between the rows of these gradients: at a distance of whole pages they would share few
// sets of the first-level cache, and products would copy them.
constexpr int64_t kGap = 32;

Kernel& statistics_kernel() {
  static auto* kernel = new Kernel("cross_entropy_statistics");
  return *kernel;
}

Kernel& loss_kernel() {
  static auto* kernel = new Kernel("cross_entropy_loss");
  return *kernel;
}

Kernel& gradient_kernel() {
  static auto* kernel = new Kernel("cross_entropy_gradient");
  return *kernel;
}

struct Options {
  double label_smoothing;
  int64_t ignore_index;
  double softcap;
};

// Targets of a call: classes, or ignored.
class Targets {
 public:
  Targets(const char* name, const at::Tensor& target, int64_t classes, int64_t ignore_index)
      : tensor_(read_once(target)) {
    const auto* const labels = tensor_.const_data_ptr<int64_t>();
    for (int64_t row = 0; row < tensor_.numel(); ++row) {
      if (labels[row] == ignore_index) continue;
      TORCH_CHECK_INDEX(0 <= labels[row] && labels[row] < classes, name,
                        ": target must be a class in [0, ", classes, ") or ignore_index ",
                        ignore_index, ", got ", labels[row]);
      ++count_;
    }
  }

  const int64_t* data() const { return tensor_.const_data_ptr<int64_t>(); }
  // Returns the number of targets that are not ignored.
  int64_t count() const { return count_; }

 private:
  at::Tensor tensor_;
  int64_t count_ = 0;
};

CrossEntropy make_parameters(const Matrix& hidden, const Matrix& weight, const Targets& targets,
                             const OptionalTensor& bias, const Options& options) {
  CrossEntropy parameters{};
  parameters.rows = hidden.rows();
  parameters.columns = weight.rows();
  parameters.depth = hidden.width();
  parameters.ignore_index = options.ignore_index;
  parameters.softcap = options.softcap;
  // The inverse of a tiny cap exceeds the range of float32.
  parameters.softcap_inverse =
      std::min<double>(1.0 / options.softcap, std::numeric_limits<float>::max());
  parameters.label_smoothing = options.label_smoothing;
  parameters.left = hidden.data();
  parameters.left_row_stride = hidden.row_stride();
  parameters.left_step_stride = hidden.step_stride();
  parameters.right = weight.data();
  parameters.right_column_stride = weight.row_stride();
  parameters.right_step_stride = weight.step_stride();
  if (bias.has_value()) {
    parameters.has_bias = true;
    parameters.bias = bias->const_data_ptr();
    parameters.bias_column_stride = bias->stride(0);
  }
  parameters.target = targets.data();
  return parameters;
}

// Returns the rows per job, which do not depend on the number of threads.
int64_t rows_of_job(int64_t rows, int64_t jobs_of_row) {
  const int64_t wanted = count_of(kJobs, jobs_of_row);
  return part_of(rows,
                 std::clamp<int64_t>(count_of(rows, wanted), kLogitTile, most_rows_of_block()),
                 kLogitTile);
}

ProductBlock block_of(int64_t row_start, int64_t band, int64_t rows, int64_t column_start,
                      int64_t column_stop) {
  return {row_start, std::min(row_start + band, rows), column_start,
          std::min(column_start + kLogitColumns, column_stop)};
}

// Data that is kept of the first rows for their gradients, or undefined tensors.
struct Kept {
  at::Tensor exponentials, bases;

  void tell(CrossEntropy& parameters) const {
    if (!exponentials.defined()) return;
    parameters.kept_rows = exponentials.size(0);
    parameters.block_columns = kLogitColumns;
    parameters.exponentials = const_cast<void*>(exponentials.const_data_ptr());
    parameters.bases = const_cast<void*>(bases.const_data_ptr());
  }
};

// Consecutive jobs share columns.
void compute_statistics(CrossEntropy& parameters, at::ScalarType dtype) {
  const int64_t splits = count_of(parameters.columns, parameters.split_columns);
  const int64_t band = rows_of_job(parameters.rows, splits);
  const int64_t bands = count_of(parameters.rows, band);
  const auto block = [&](int64_t job, int64_t start, int64_t stop) {
    return block_of(job % bands * band, band, parameters.rows, start, stop);
  };
  run_jobs(parameters, statistics_kernel().get<CrossEntropyFunction>(dtype), splits * bands,
           block(0, 0, parameters.columns), [&](int64_t job, int64_t, const auto& call) {
             const int64_t start = job / bands * parameters.split_columns;
             const int64_t stop = std::min(start + parameters.split_columns, parameters.columns);
             for (int64_t column = start; column < stop; column += kLogitColumns) {
               call(block(job, column, stop));
             }
           });
}

void compute_losses(const CrossEntropy& parameters, at::ScalarType dtype) {
  const auto block = [&](int64_t job) {
    return block_of(job * kLogitTile, kLogitTile, parameters.rows, 0, 0);
  };
  run_jobs(parameters, loss_kernel().get<CrossEntropyFunction>(dtype),
           count_of(parameters.rows, kLogitTile), block(0),
           [&](int64_t job, int64_t, const auto& call) { call(block(job)); });
}

// Losses of ignored targets are zero.
template <class Number>
void store_mean(const at::Tensor& loss, int64_t count, const at::Tensor& mean) {
  const auto* const losses = loss.const_data_ptr<Number>();
  double total = 0.0;
  for (int64_t row = 0; row < loss.numel(); ++row) total += losses[row];
  const double none = std::numeric_limits<double>::quiet_NaN();
  *mean.mutable_data_ptr<Number>() = static_cast<Number>(count == 0 ? none : total / count);
}

using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Results compute(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                const OptionalTensor& bias, double label_smoothing, int64_t ignore_index,
                double softcap, const Kept& kept) {
  const Targets targets("linear_cross_entropy", target, weight.size(0), ignore_index);
  const auto dtype = hidden.scalar_type(), sums = compute_type(dtype);
  const auto options = hidden.options().dtype(sums);
  const at::Tensor loss = at::empty(target.sizes(), options);
  const at::Tensor logsumexp = at::empty(target.sizes(), options), mean = at::empty({}, options);
  if (loss.numel() > 0) {
    const Matrix left(hidden), right(weight);
    auto parameters =
        make_parameters(left, right, targets, bias, {label_smoothing, ignore_index, softcap});
    kept.tell(parameters);
    const int64_t blocks = count_of(parameters.columns, kLogitColumns);
    parameters.split_columns = std::max<int64_t>(count_of(blocks, kMostSplits), 1) * kLogitColumns;
    const int64_t splits = count_of(parameters.columns, parameters.split_columns);
    const at::Tensor statistics = at::empty({3, splits * parameters.rows}, options);
    auto* const first = static_cast<char*>(statistics.mutable_data_ptr());
    const int64_t bytes = splits * parameters.rows * statistics.itemsize();
    parameters.largest = first;
    parameters.total = first + bytes;
    parameters.logit_sum = first + 2 * bytes;
    parameters.loss = loss.mutable_data_ptr();
    parameters.logsumexp = logsumexp.mutable_data_ptr();
    if (parameters.columns > 0) compute_statistics(parameters, dtype);
    compute_losses(parameters, dtype);
  }
  if (sums == at::kDouble) {
    store_mean<double>(loss, targets.count(), mean);
  } else {
    store_mean<float>(loss, targets.count(), mean);
  }
  return {loss, logsumexp, mean};
}

Results linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                             const at::Tensor& target, const OptionalTensor& bias,
                             double label_smoothing, int64_t ignore_index, double softcap) {
  check_linear_cross_entropy(hidden, weight, target, bias, label_smoothing, softcap);
  return compute(hidden, weight, target, bias, label_smoothing, ignore_index, softcap, {});
}

using ResultsAndKept = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

ResultsAndKept linear_cross_entropy_training(const at::Tensor& hidden, const at::Tensor& weight,
                                             const at::Tensor& target, const OptionalTensor& bias,
                                             double label_smoothing, int64_t ignore_index,
                                             double softcap) {
  check_linear_cross_entropy(hidden, weight, target, bias, label_smoothing, softcap);
  const auto [rows, blocks] = kept_sizes(target.numel(), hidden.size(-1), weight.size(0), softcap);
  const auto options = hidden.options();
  const auto dtype = hidden.scalar_type();
  const int64_t count = rows.expect_int();
  const Kept kept{new_tensor({count, weight.size(0)}, options.dtype(factor_type(dtype))),
                  at::empty({blocks.expect_int(), count}, options.dtype(compute_type(dtype)))};
  return std::tuple_cat(
      compute(hidden, weight, target, bias, label_smoothing, ignore_index, softcap, kept),
      std::make_tuple(kept.exponentials, kept.bases));
}

// ---------------------------------------------------------------------------------------- backward

double number_in(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? *tensor.const_data_ptr<double>()
                                             : *tensor.const_data_ptr<float>();
}

// Writes the gradients of the logits of some classes, for all rows.
void compute_gradients(CrossEntropy& parameters, at::ScalarType dtype, int64_t start,
                       int64_t stop) {
  parameters.first_column = start;
  const int64_t columns = count_of(stop - start, kLogitColumns);
  const int64_t band = rows_of_job(parameters.rows, columns);
  const int64_t bands = count_of(parameters.rows, band);
  const auto block = [&](int64_t job) {
    return block_of(job % bands * band, band, parameters.rows, start + job / bands * kLogitColumns,
                    stop);
  };
  run_jobs(parameters, gradient_kernel().get<CrossEntropyFunction>(dtype), columns * bands,
           block(0), [&](int64_t job, int64_t, const auto& call) { call(block(job)); });
}

// Gradients that are not required have no elements.
Results differentiate(const char* name, const OptionalTensor& grad_loss,
                      const OptionalTensor& grad_logsumexp, const OptionalTensor& grad_mean,
                      const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                      const OptionalTensor& bias, const at::Tensor& logsumexp, const Kept& kept,
                      bool hidden_requires_grad, bool weight_requires_grad, bool bias_requires_grad,
                      const Options& options) {
  const Targets targets(name, target, weight.size(0), options.ignore_index);
  LogitGradients gradients(hidden, weight, hidden_requires_grad, weight_requires_grad,
                           bias_requires_grad);
  const Matrix left(hidden), right(weight);
  auto parameters = make_parameters(left, right, targets, bias, options);
  kept.tell(parameters);
  const at::Tensor sums = logsumexp.contiguous();
  parameters.logsumexp = const_cast<void*>(sums.const_data_ptr());
  at::Tensor of_loss, of_logsumexp;
  if (grad_loss.has_value()) {
    of_loss = grad_loss->contiguous();
    parameters.has_grad_loss = true;
    parameters.grad_loss = of_loss.const_data_ptr();
  }
  if (grad_logsumexp.has_value()) {
    of_logsumexp = grad_logsumexp->contiguous();
    parameters.has_grad_logsumexp = true;
    parameters.grad_logsumexp = of_logsumexp.const_data_ptr();
  }
  if (grad_mean.has_value()) parameters.grad_mean_share = number_in(*grad_mean) / targets.count();
  if (parameters.columns == 0) return gradients.results();
  const int64_t width = part_of(parameters.columns, kChunk, kLogitColumns);
  const auto dtype = hidden.scalar_type();
  const at::Tensor chunk =
      new_tensor({parameters.rows, width + kGap}, hidden.options().dtype(factor_type(dtype)));
  parameters.grad_logits = chunk.mutable_data_ptr();
  parameters.grad_logits_row_stride = width + kGap;
  for (int64_t start = 0; start < parameters.columns; start += width) {
    const int64_t count = std::min(width, parameters.columns - start);
    if (parameters.rows > 0) {
      compute_gradients(parameters, dtype, start, start + count);
    }
    gradients.add(chunk.narrow(1, 0, count), start, count);
  }
  return gradients.results();
}

Results linear_cross_entropy_backward(const OptionalTensor& grad_loss,
                                      const OptionalTensor& grad_logsumexp,
                                      const OptionalTensor& grad_mean, const at::Tensor& hidden,
                                      const at::Tensor& weight, const at::Tensor& target,
                                      const OptionalTensor& bias, const at::Tensor& logsumexp,
                                      bool hidden_requires_grad, bool weight_requires_grad,
                                      bool bias_requires_grad, double label_smoothing,
                                      int64_t ignore_index, double softcap) {
  check_linear_cross_entropy_backward(grad_loss, grad_logsumexp, grad_mean, hidden, weight, target,
                                      bias, logsumexp, bias_requires_grad, label_smoothing,
                                      softcap);
  return differentiate("linear_cross_entropy_backward", grad_loss, grad_logsumexp, grad_mean,
                       hidden, weight, target, bias, logsumexp, {}, hidden_requires_grad,
                       weight_requires_grad, bias_requires_grad,
                       {label_smoothing, ignore_index, softcap});
}

Results linear_cross_entropy_training_backward(
    const OptionalTensor& grad_loss, const OptionalTensor& grad_logsumexp,
    const OptionalTensor& grad_mean, const at::Tensor& hidden, const at::Tensor& weight,
    const at::Tensor& target, const OptionalTensor& bias, const at::Tensor& logsumexp,
    const at::Tensor& exponentials, const at::Tensor& bases, bool hidden_requires_grad,
    bool weight_requires_grad, bool bias_requires_grad, double label_smoothing,
    int64_t ignore_index, double softcap) {
  check_linear_cross_entropy_backward(grad_loss, grad_logsumexp, grad_mean, hidden, weight, target,
                                      bias, logsumexp, bias_requires_grad, label_smoothing,
                                      softcap);
  check_kept(hidden, weight, target, exponentials, bases, softcap);
  return differentiate("linear_cross_entropy_training_backward", grad_loss, grad_logsumexp,
                       grad_mean, hidden, weight, target, bias, logsumexp,
                       {exponentials.contiguous(), bases.contiguous()}, hidden_requires_grad,
                       weight_requires_grad, bias_requires_grad,
                       {label_smoothing, ignore_index, softcap});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_shared_kernel<"foo::linear_cross_entropy", &linear_cross_entropy>(library);
  register_shared_kernel<"foo::linear_cross_entropy_backward", &linear_cross_entropy_backward>(
      library);
  register_shared_kernel<"foo::linear_cross_entropy_training", &linear_cross_entropy_training>(
      library);
  register_shared_kernel<"foo::linear_cross_entropy_training_backward",
                         &linear_cross_entropy_training_backward>(library);
}

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
              "to match the rows of hidden");
  if (bias.has_value()) {
    check_dimensions(name, "bias", *bias, 1, "(V)");
    check_like(name, "bias", *bias, "hidden", hidden);
    check_one_each(name, "bias", "elements", bias->sym_size(0), weight.sym_size(0),
                   "row of weight");
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
                    ": bias must be given if bias_requires_grad is true, got None");
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
  check_one_each(name, "exponentials", "columns", exponentials.sym_size(1), weight.sym_size(0),
                 "row of weight");
  const auto dtype = hidden.scalar_type() == at::kHalf ? at::kFloat : hidden.scalar_type();
  TORCH_CHECK_TYPE(exponentials.scalar_type() == dtype, name, ": exponentials must be ",
                   dtype_name(dtype), " where hidden is ", dtype_name(hidden.scalar_type()),
                   ", got ", dtype_name(exponentials.scalar_type()));
  const c10::SymInt of_bases[] = {blocks, rows};
  check_sum(name, "bases", bases, of_bases,
            "for the blocks of columns and the rows of exponentials", hidden);
}

}  // namespace foo
