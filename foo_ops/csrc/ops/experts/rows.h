// Rows of a mixture of experts: which expert each belongs to, and what happens to them between the
// products. tests/project/test_agreement.py compares the structs with foo_ops/kernels/experts.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "launch/kernel_table.h"

namespace foo {

// Rows of projections, which a gate turns into activated rows of `columns` elements. Neighbouring
// columns of the gate are `step` elements apart, and the other half of a row begins at `up`.
struct Gate {
  int64_t columns, is_gated, step, up, projected_stride;
  double alpha, limit, up_offset;
  const void* projected;
  void* activated;
  // For gradients.
  const void* grad_activated;
  const void* weight;
  void *grad_weight, *grad_projected;
};

template <>
struct Layout<Gate> {
  using Struct = Gate;
  static constexpr const char* name = "Gate";
  static constexpr Field fields[] =
      FOO_FIELDS(columns, is_gated, step, up, projected_stride, alpha, limit, up_offset, projected,
                 activated, grad_activated, weight, grad_weight, grad_projected);
};
static_assert(is_whole<Gate>());

// Tokens that add up `top_k` rows each. ``place`` is the row of each choice, or -1.
struct Combine {
  int64_t columns, top_k, has_weight;
  const void* rows;
  const int64_t* place;
  const void* weight;
  void* output;
};

template <>
struct Layout<Combine> {
  using Struct = Combine;
  static constexpr const char* name = "Combine";
  static constexpr Field fields[] =
      FOO_FIELDS(columns, top_k, has_weight, rows, place, weight, output);
};
static_assert(is_whole<Combine>());

struct RowRange {
  int64_t start, stop;
};

template <>
struct Layout<RowRange> {
  using Struct = RowRange;
  static constexpr const char* name = "RowRange";
  static constexpr Field fields[] = FOO_FIELDS(start, stop);
};
static_assert(is_whole<RowRange>());

// If ``bytes`` is given, the kernel only writes there how much scratch memory it needs.
using GateFunction = void(const Gate* gate, const RowRange* rows, void* scratch, int64_t* bytes);
using CombineFunction = void(const Combine* combine, const RowRange* tokens, void* scratch,
                             int64_t* bytes);

// Choices of experts, sorted by expert.
struct Routing {
  // First row of each expert, and the number of rows.
  std::vector<int64_t> starts;
  // Choice of each row, and row of each choice: -1 if it is of no expert.
  std::vector<int64_t> choices, places;

  int64_t experts() const { return static_cast<int64_t>(starts.size()) - 1; }
  int64_t rows() const { return starts.back(); }
  int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
};

// Reads and checks the experts of all choices; `experts` itself stands for none.
Routing route(const at::Tensor& expert_index, int64_t experts);

// How projections become activated rows: activation(gate) * (up + up_offset), with gate at most
// `limit` and up within plus and minus it.
struct GateOptions {
  std::string_view activation;
  bool is_gated, is_interleaved;
  double alpha;
  std::optional<double> limit;
  double up_offset;
};

// Raises unless the activation is known and the numbers are in range.
void check_gate(const char* name, const GateOptions& options);

// Returns the number of activated columns for projections of this width.
inline int64_t activated_columns(const GateOptions& options, int64_t columns) {
  return options.is_gated ? columns / 2 : columns;
}

// Returns the rows of a contiguous matrix, one for each row of the routing: those of the tokens.
at::Tensor gather(const at::Tensor& tokens, const Routing& routing, int64_t top_k);

// Returns the activated rows.
at::Tensor activate(const at::Tensor& projected, const GateOptions& options);

struct GateGradients {
  // Activated rows times their weights, their dot products with the gradients, in the compute
  // type, and the gradients of the projections.
  at::Tensor weighted, grad_weight, grad_projected;
};

// ``weight`` has an element of the compute type for each row, and grad_activated has the gradients
// of the activated rows without the weight.
GateGradients activate_backward(const at::Tensor& projected, const at::Tensor& grad_activated,
                                const at::Tensor& weight, const GateOptions& options);

// Returns for each token the sum of its rows, times ``weight`` if that is given: (tokens, top_k),
// contiguous, of the compute type.
at::Tensor combine(const at::Tensor& rows, const Routing& routing, int64_t tokens, int64_t top_k,
                   const std::optional<at::Tensor>& weight);

}  // namespace foo
