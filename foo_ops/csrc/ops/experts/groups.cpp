#include "ops/experts/groups.h"

#include <ATen/ops/ones.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "launch/jobs.h"
#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "launch/registration.h"
#include "launch/symbols.h"
#include "ops/linear/linear.h"

namespace foo {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

const void* row_of(const at::Tensor& matrix, int64_t row) {
  const auto* const data = static_cast<const char*>(matrix.const_data_ptr());
  return data + row * matrix.stride(0) * matrix.itemsize();
}

void* mutable_row_of(const at::Tensor& matrix, int64_t row) {
  return const_cast<void*>(row_of(matrix, row));
}

// Calls work(group, first row, rows) for each group that has rows.
template <class Work>
void for_groups(Starts starts, Work work) {
  for (size_t group = 0; group + 1 < starts.size(); ++group) {
    const int64_t count = starts[group + 1] - starts[group];
    if (count > 0) work(static_cast<int64_t>(group), starts[group], count);
  }
}

// Returns the product of a group's rows, apart from its right matrix.
Product forward_product(const at::Tensor& output, const at::Tensor& rows,
                        const OptionalTensor& bias, int64_t group, int64_t first, int64_t count) {
  return {.rows = count,
          .columns = output.size(1),
          .depth = rows.size(1),
          .is_transposed = false,
          .left = row_of(rows, first),
          .left_row_stride = rows.size(1),
          .left_step_stride = 1,
          .right = nullptr,
          .right_column_stride = 1,
          .right_step_stride = 1,
          .second = nullptr,
          .has_bias = bias.has_value(),
          .bias = bias.has_value() ? row_of(*bias, group) : nullptr,
          .bias_stride = bias.has_value() ? bias->stride(1) : 0,
          .output = mutable_row_of(output, first),
          .output_stride = output.size(1)};
}

void clear_groups_without_rows(const at::Tensor& gradients, Starts starts) {
  const int64_t elements = gradients.numel() / std::max<int64_t>(1, gradients.size(0));
  const int64_t bytes = elements * gradients.itemsize();
  auto* const data = static_cast<char*>(gradients.mutable_data_ptr());
  share_steps(gradients.size(0), static_cast<double>(elements), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      if (starts[group] == starts[group + 1]) std::memset(data + group * bytes, 0, bytes);
    }
  });
}

bool has_adjacent(const at::Tensor& matrices, int64_t dim) {
  return matrices.size(dim) <= 1 || matrices.stride(dim) == 1;
}

}  // namespace

bool lies_transposed(const at::Tensor& matrices) {
  return !has_adjacent(matrices, 2) && has_adjacent(matrices, 1);
}

GroupMatrices::GroupMatrices(const at::Tensor& matrices)
    : tensor_(has_adjacent(matrices, 2) || has_adjacent(matrices, 1) ? matrices
                                                                     : matrices.contiguous()) {}

const void* GroupMatrices::of(int64_t group) const {
  return row_of(tensor_, group);
}

void add_forward(std::vector<Product>& products, const at::Tensor& output, const at::Tensor& rows,
                 const GroupMatrices& matrices, const OptionalTensor& bias, Starts starts) {
  for_groups(starts, [&](int64_t group, int64_t first, int64_t count) {
    Product product = forward_product(output, rows, bias, group, first, count);
    product.right = matrices.of(group);
    product.right_column_stride = matrices.row_stride();
    product.right_step_stride = matrices.columns() <= 1 ? 1 : matrices.column_stride();
    products.push_back(product);
  });
}

void add_quantized_forward(std::vector<ProductCall<QuantizedProduct>>& calls,
                           const at::Tensor& output, const at::Tensor& rows,
                           const QuantizedWeights& weights, const OptionalTensor& bias,
                           Starts starts) {
  if (output.numel() == 0) return;
  const auto all = static_cast<double>(starts.back());
  for_groups(starts, [&](int64_t group, int64_t first, int64_t count) {
    Product product = forward_product(output, rows, bias, group, first, count);
    product.right = row_of(weights.weight, group);
    product.right_column_stride = weights.weight.stride(1);
    product.right_step_stride = 1;
    const auto least = std::ceil(static_cast<double>(count) / all * least_blocks());
    calls.push_back(
        quantized_call(product, weights, group, rows.scalar_type(), static_cast<int64_t>(least)));
  });
}

void add_grad_rows(std::vector<Product>& products, const at::Tensor& grad_rows,
                   const at::Tensor& grad_output, const GroupMatrices& matrices, Starts starts) {
  for_groups(starts, [&](int64_t group, int64_t first, int64_t count) {
    products.push_back(
        {.rows = count,
         .columns = matrices.columns(),
         .depth = matrices.rows(),
         .is_transposed = false,
         .left = row_of(grad_output, first),
         .left_row_stride = grad_output.size(1),
         .left_step_stride = 1,
         .right = matrices.of(group),
         .right_column_stride = matrices.columns() <= 1 ? 1 : matrices.column_stride(),
         .right_step_stride = matrices.rows() <= 1 ? 1 : matrices.row_stride(),
         .second = nullptr,
         .has_bias = false,
         .bias = nullptr,
         .bias_stride = 0,
         .output = mutable_row_of(grad_rows, first),
         .output_stride = matrices.columns()});
  });
}

void add_grad_matrices(std::vector<Product>& products, const at::Tensor& grad_matrices,
                       const at::Tensor& grad_output, const at::Tensor& rows, Starts starts) {
  clear_groups_without_rows(grad_matrices, starts);
  const bool is_transposed = lies_transposed(grad_matrices);
  const at::Tensor& left = is_transposed ? rows : grad_output;
  const at::Tensor& right = is_transposed ? grad_output : rows;
  for_groups(starts, [&](int64_t group, int64_t first, int64_t count) {
    products.push_back({.rows = left.size(1),
                        .columns = right.size(1),
                        .depth = count,
                        .is_transposed = false,
                        .left = row_of(left, first),
                        .left_row_stride = 1,
                        .left_step_stride = count == 1 ? 1 : left.size(1),
                        .right = row_of(right, first),
                        .right_column_stride = 1,
                        .right_step_stride = count == 1 ? 1 : right.size(1),
                        .second = nullptr,
                        .has_bias = false,
                        .bias = nullptr,
                        .bias_stride = 0,
                        .output = mutable_row_of(grad_matrices, group),
                        .output_stride = right.size(1)});
  });
}

void add_grad_bias(std::vector<Product>& products, const at::Tensor& grad_bias,
                   const at::Tensor& grad_output, const at::Tensor& weight, Starts starts) {
  clear_groups_without_rows(grad_bias, starts);
  const bool is_one = weight.numel() == 1;
  for_groups(starts, [&](int64_t group, int64_t first, int64_t count) {
    products.push_back({.rows = 1,
                        .columns = grad_output.size(1),
                        .depth = count,
                        .is_transposed = false,
                        .left = is_one ? weight.const_data_ptr() : row_of(weight, first),
                        .left_row_stride = 1,
                        .left_step_stride = is_one ? 0 : 1,
                        .right = row_of(grad_output, first),
                        .right_column_stride = 1,
                        .right_step_stride = count == 1 ? 1 : grad_output.size(1),
                        .second = nullptr,
                        .has_bias = false,
                        .bias = nullptr,
                        .bias_stride = 0,
                        .output = mutable_row_of(grad_bias, group),
                        .output_stride = grad_output.size(1)});
  });
}

at::Tensor make_grad_matrices(const at::Tensor& matrices) {
  if (!lies_transposed(matrices)) return new_tensor(matrices.sizes(), matrices.options());
  return new_tensor({matrices.size(0), matrices.size(2), matrices.size(1)}, matrices.options())
      .transpose(1, 2);
}

// ------------------------------------------------------------------------------------------ checks

void check_group_bias(const char* name, const char* argument, const at::Tensor& bias,
                      const char* of, const at::Tensor& matrices) {
  check_dimensions(name, argument, bias, 2, "(E, N)");
  check_one_each(name, argument, "rows", bias.sym_size(0), matrices.sym_size(0),
                 (std::string("matrix of ") + of).c_str());
  check_one_each(name, argument, "columns", bias.sym_size(1), matrices.sym_size(1),
                 (std::string("row of ") + of).c_str());
}

namespace {

constexpr const char* kGroupedLinear = "grouped_linear";

void check_offsets(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& offsets) {
  check_dimensions(kGroupedLinear, "offsets", offsets, 1, "(E)");
  TORCH_CHECK_VALUE(offsets.device() == input.device(), kGroupedLinear, ": offsets must be on ",
                    input.device(), " as input is, got ", offsets.device());
  TORCH_CHECK_TYPE(offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong,
                   kGroupedLinear, ": offsets must be int32 or int64, got ",
                   dtype_name(offsets.scalar_type()));
  check_one_each(kGroupedLinear, "offsets", "elements", offsets.sym_size(0), weight.sym_size(0),
                 "matrix of weight");
}

template <class Integer>
void append(std::vector<int64_t>& numbers, const at::Tensor& tensor) {
  const auto* const values = tensor.const_data_ptr<Integer>();
  numbers.insert(numbers.end(), values, values + tensor.numel());
}

std::vector<int64_t> starts_of(const at::Tensor& offsets, int64_t rows) {
  const at::Tensor ends = read_once(offsets);
  std::vector<int64_t> starts{0};
  ends.scalar_type() == at::kInt ? append<int32_t>(starts, ends) : append<int64_t>(starts, ends);
  for (size_t group = 1; group < starts.size(); ++group) {
    TORCH_CHECK_VALUE(starts[group - 1] <= starts[group] && starts[group] <= rows, kGroupedLinear,
                      ": offsets must not decrease, nor exceed the ", rows, " rows of input, got ",
                      starts[group], " after ", starts[group - 1]);
  }
  return starts;
}

// Rows behind the last group are zeros.
void clear_other_rows(const at::Tensor& output, Starts starts) {
  output.narrow(0, starts.back(), output.size(0) - starts.back()).zero_();
}

at::Tensor grouped_linear(const at::Tensor& input, const at::Tensor& weight,
                          const at::Tensor& offsets, const OptionalTensor& bias) {
  check_grouped_linear(input, weight, offsets, bias);
  const auto starts = starts_of(offsets, input.size(0));
  const at::Tensor output = new_tensor({input.size(0), weight.size(1)}, input.options());
  clear_other_rows(output, starts);
  std::vector<Product> products;
  const at::Tensor rows = input.contiguous();
  const GroupMatrices matrices(weight);
  add_forward(products, output, rows, matrices, bias, starts);
  multiply_all(products, input.scalar_type());
  return output;
}

using GroupGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Gradients that are not required have no elements.
GroupGradients grouped_linear_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                       const at::Tensor& weight, const at::Tensor& offsets,
                                       bool input_requires_grad, bool weight_requires_grad,
                                       bool bias_requires_grad) {
  check_grouped_linear_backward(grad_output, input, weight, offsets);
  const auto starts = starts_of(offsets, input.size(0));
  const at::Tensor none = at::empty({0}, input.options());
  const at::Tensor grad = grad_output.contiguous(), rows = input.contiguous();
  const GroupMatrices matrices(weight);
  std::vector<Product> products;
  at::Tensor grad_input = none, grad_weight = none, grad_bias = none;
  if (input_requires_grad) {
    grad_input = new_tensor(input.sizes(), input.options());
    clear_other_rows(grad_input, starts);
    add_grad_rows(products, grad_input, grad, matrices, starts);
  }
  if (weight_requires_grad) {
    grad_weight = make_grad_matrices(weight);
    add_grad_matrices(products, grad_weight, grad, rows, starts);
  }
  const at::Tensor one = at::ones({1}, input.options());
  if (bias_requires_grad) {
    grad_bias = new_tensor({weight.size(0), weight.size(1)}, input.options());
    add_grad_bias(products, grad_bias, grad, one, starts);
  }
  multiply_all(products, input.scalar_type());
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

void check_grouped_linear(const at::Tensor& input, const at::Tensor& weight,
                          const at::Tensor& offsets, const OptionalTensor& bias) {
  check_dtype(kGroupedLinear, "input", input);
  check_dimensions(kGroupedLinear, "input", input, 2, "(S, K)");
  check_dimensions(kGroupedLinear, "weight", weight, 3, "(E, N, K)");
  check_like(kGroupedLinear, "weight", weight, "input", input);
  check_count(kGroupedLinear, "weight", "columns", weight.sym_size(2), input.sym_size(1),
              "input has");
  check_offsets(input, weight, offsets);
  if (bias.has_value()) {
    check_group_bias(kGroupedLinear, "bias", *bias, "weight", weight);
    check_like(kGroupedLinear, "bias", *bias, "input", input);
  }
}

void check_grouped_linear_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                   const at::Tensor& weight, const at::Tensor& offsets) {
  check_grouped_linear(input, weight, offsets, std::nullopt);
  check_dimensions(kGroupedLinear, "grad_output", grad_output, 2, "(S, N)");
  check_like(kGroupedLinear, "grad_output", grad_output, "input", input);
  check_count(kGroupedLinear, "grad_output", "rows", grad_output.sym_size(0), input.sym_size(0),
              "input has");
  check_one_each(kGroupedLinear, "grad_output", "columns", grad_output.sym_size(1),
                 weight.sym_size(1), "row of weight");
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_shared_kernel<"foo::grouped_linear", &grouped_linear>(library);
  register_shared_kernel<"foo::grouped_linear_backward", &grouped_linear_backward>(library);
}

}  // namespace foo
