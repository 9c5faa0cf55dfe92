// Products of groups of rows, each with a matrix of its own: foo::grouped_linear, and the layers of
// mixtures of experts.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "ops/linear/product.h"
#include "ops/linear/quantized.h"

namespace foo {

// Matrices of groups, (E, N, K). Either the columns of a matrix are adjacent in memory, or its rows
// are; other tensors are copied.
class GroupMatrices {
 public:
  explicit GroupMatrices(const at::Tensor& matrices);

  int64_t groups() const { return tensor_.size(0); }
  int64_t rows() const { return tensor_.size(1); }
  int64_t columns() const { return tensor_.size(2); }
  int64_t row_stride() const { return tensor_.stride(1); }
  int64_t column_stride() const { return tensor_.stride(2); }
  const void* of(int64_t group) const;

 private:
  at::Tensor tensor_;
};

// Whether the rows of each matrix are adjacent, as those of a transposed one are.
bool lies_transposed(const at::Tensor& matrices);

// Rows of group g begin at starts[g], and end at starts[g + 1].
using Starts = c10::ArrayRef<int64_t>;

// Adds the products of the rows of each group with its matrix, to be run together. The rows and the
// output are contiguous.
// output = rows matrix^T + bias
void add_forward(std::vector<Product>& products, const at::Tensor& output, const at::Tensor& rows,
                 const GroupMatrices& matrices, const std::optional<at::Tensor>& bias,
                 Starts starts);
// The same with matrices of integers.
void add_quantized_forward(std::vector<ProductCall<QuantizedProduct>>& calls,
                           const at::Tensor& output, const at::Tensor& rows,
                           const QuantizedWeights& weights, const std::optional<at::Tensor>& bias,
                           Starts starts);
// grad_rows = grad_output matrix
void add_grad_rows(std::vector<Product>& products, const at::Tensor& grad_rows,
                   const at::Tensor& grad_output, const GroupMatrices& matrices, Starts starts);
// grad_matrix = grad_output^T rows, of the layout that `make_grad_matrices` chooses. Zeros for
// groups without rows.
void add_grad_matrices(std::vector<Product>& products, const at::Tensor& grad_matrices,
                       const at::Tensor& grad_output, const at::Tensor& rows, Starts starts);
// grad_bias = sum over the rows of weight times grad_output, where ``weight`` has an element for
// each row, or one for all. Zeros for groups without rows.
void add_grad_bias(std::vector<Product>& products, const at::Tensor& grad_bias,
                   const at::Tensor& grad_output, const at::Tensor& weight, Starts starts);

// Returns an uninitialized tensor of the matrices' shape and order in memory.
at::Tensor make_grad_matrices(const at::Tensor& matrices);

// Checks the shape of a bias of groups, (E, N) as the matrices `of` are (E, N, K). Raises, and
// reads only metadata.
void check_group_bias(const char* name, const char* argument, const at::Tensor& bias,
                      const char* of, const at::Tensor& matrices);

void check_grouped_linear(const at::Tensor& input, const at::Tensor& weight,
                          const at::Tensor& offsets, const std::optional<at::Tensor>& bias);
void check_grouped_linear_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                   const at::Tensor& weight, const at::Tensor& offsets);

}  // namespace foo
