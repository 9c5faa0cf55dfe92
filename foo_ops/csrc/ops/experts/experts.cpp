#include "ops/experts/experts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "launch/registration.h"
#include "launch/symbols.h"
#include "ops/experts/groups.h"
#include "ops/experts/rows.h"
#include "ops/linear/linear.h"
#include "ops/linear/product.h"

namespace foo {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kName = "moe_experts";

// Returns a matrix for the projections of all choices, with zeros for those of no expert.
Tensor make_projections(const Tensor& rows, int64_t columns, const Routing& routing) {
  const auto choices = static_cast<int64_t>(routing.places.size());
  const Tensor output = new_tensor({choices, columns}, rows.options());
  if (choices > routing.rows()) output.narrow(0, routing.rows(), choices - routing.rows()).zero_();
  return output;
}

// The matrices of all experts, and their biases: ``project`` multiplies rows by that of their
// expert.
struct Layer {
  const Tensor& matrices;
  const OptionalTensor& bias;

  Tensor project(const Tensor& rows, const Routing& routing) const {
    const Tensor output = make_projections(rows, matrices.size(1), routing);
    const GroupMatrices groups(matrices);
    std::vector<Product> products;
    add_forward(products, output, rows, groups, bias, routing.starts);
    multiply_all(products, rows.scalar_type());
    return output;
  }
};

struct QuantizedLayer {
  QuantizedWeights weights;
  const OptionalTensor& bias;

  Tensor project(const Tensor& rows, const Routing& routing) const {
    const Tensor output = make_projections(rows, weights.weight.size(1), routing);
    std::vector<ProductCall<QuantizedProduct>> calls;
    add_quantized_forward(calls, output, rows, weights, bias, routing.starts);
    if (!calls.empty()) run_together(calls);
    return output;
  }
};

Tensor in_compute_type(const Tensor& weight, const Tensor& hidden) {
  return weight.to(hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).contiguous();
}

using Trained = std::tuple<Tensor, Tensor>;

// Returns the output, and the projections, which a backward pass needs.
template <class AnyLayer>
Trained run(const Tensor& hidden, const Tensor& expert_index, const Tensor& expert_weight,
            int64_t experts, const AnyLayer& up, const AnyLayer& down, const GateOptions& options) {
  const Routing routing = route(expert_index, experts);
  const int64_t tokens = hidden.size(0), top_k = expert_index.size(1);
  const Tensor projected = up.project(gather(hidden, routing, top_k), routing);
  const Tensor results = down.project(activate(projected, options), routing);
  const Tensor weight = in_compute_type(expert_weight, hidden);
  return {combine(results, routing, tokens, top_k, weight), projected};
}

Trained moe_experts_training(const Tensor& hidden, const Tensor& expert_index,
                             const Tensor& expert_weight, const Tensor& gate_up, const Tensor& down,
                             const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                             std::string_view activation, bool is_gated, bool is_interleaved,
                             double alpha, std::optional<double> limit, double up_offset) {
  check_moe_experts(hidden, expert_index, expert_weight, gate_up, down, gate_up_bias, down_bias,
                    activation, is_gated, alpha, limit);
  return run(hidden, expert_index, expert_weight, gate_up.size(0), Layer{gate_up, gate_up_bias},
             Layer{down, down_bias},
             {activation, is_gated, is_interleaved, alpha, limit, up_offset});
}

Tensor moe_experts(const Tensor& hidden, const Tensor& expert_index, const Tensor& expert_weight,
                   const Tensor& gate_up, const Tensor& down, const OptionalTensor& gate_up_bias,
                   const OptionalTensor& down_bias, std::string_view activation, bool is_gated,
                   bool is_interleaved, double alpha, std::optional<double> limit,
                   double up_offset) {
  return std::get<0>(moe_experts_training(hidden, expert_index, expert_weight, gate_up, down,
                                          gate_up_bias, down_bias, activation, is_gated,
                                          is_interleaved, alpha, limit, up_offset));
}

// Returns the number of steps that share a scale, or 0 for one scale per row.
int64_t group_size_of(const Tensor& weight, const Tensor& scale, bool has_zero) {
  const bool are_mxfp4 = QuantizedWeights::is_exponent(scale);
  if (!has_zero && !are_mxfp4) return group_size_of_bytes(weight, scale);
  return scale.size(2) == 0 ? kMxfp4GroupSize : 2 * weight.size(2) / scale.size(2);
}

Tensor moe_experts_quantized(const Tensor& hidden, const Tensor& expert_index,
                             const Tensor& expert_weight, const Tensor& gate_up,
                             const Tensor& gate_up_scale, const OptionalTensor& gate_up_zero,
                             const Tensor& down, const Tensor& down_scale,
                             const OptionalTensor& down_zero, const OptionalTensor& gate_up_bias,
                             const OptionalTensor& down_bias, std::string_view activation,
                             bool is_gated, bool is_interleaved, double alpha,
                             std::optional<double> limit, double up_offset) {
  check_moe_experts_quantized(hidden, expert_index, expert_weight, gate_up, gate_up_scale,
                              gate_up_zero, down, down_scale, down_zero, gate_up_bias, down_bias,
                              activation, is_gated, alpha, limit);
  const auto weights = [](const Tensor& weight, const Tensor& scale, const OptionalTensor& zero) {
    return make_quantized_weights(weight, scale, zero,
                                  group_size_of(weight, scale, zero.has_value()));
  };
  return std::get<0>(
      run(hidden, expert_index, expert_weight, gate_up.size(0),
          QuantizedLayer{weights(gate_up, gate_up_scale, gate_up_zero), gate_up_bias},
          QuantizedLayer{weights(down, down_scale, down_zero), down_bias},
          {activation, is_gated, is_interleaved, alpha, limit, up_offset}));
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct Wanted {
  bool hidden, expert_weight, gate_up, down, gate_up_bias, down_bias;
};

// The gradient of each row's weight, in the order of choices: zero for those of no expert.
Tensor grad_of_weights(const Tensor& of_rows, const Routing& routing, const Tensor& expert_weight) {
  const Tensor gradient = at::zeros(expert_weight.sizes(), of_rows.options());
  auto* const target = static_cast<char*>(gradient.mutable_data_ptr());
  const auto* const source = static_cast<const char*>(of_rows.const_data_ptr());
  const int64_t size = of_rows.itemsize();
  for (int64_t row = 0; row < routing.rows(); ++row) {
    std::memcpy(target + routing.choices[row] * size, source + row * size, size);
  }
  return gradient.to(expert_weight.scalar_type());
}

// Weights of the rows, in the order of rows.
Tensor weights_of_rows(const Tensor& expert_weight, const Routing& routing) {
  const Tensor weights = at::empty({routing.rows()}, expert_weight.options());
  auto* const target = static_cast<char*>(weights.mutable_data_ptr());
  const auto* const source = static_cast<const char*>(expert_weight.const_data_ptr());
  const int64_t size = expert_weight.itemsize();
  for (int64_t row = 0; row < routing.rows(); ++row) {
    std::memcpy(target + row * size, source + routing.choices[row] * size, size);
  }
  return weights;
}

// With rows x of hidden, projections p = x gate_up^T, activated rows a(p), weights w and gradients
// g of the tokens' outputs w (a(p) down^T + bias):
//
//   d = g down                     grad_weight = d . a(p) + g . bias     grad_p = w d a'(p)
//   grad_x = grad_p gate_up        grad_gate_up = grad_p^T x             grad_down = g^T (w a(p))
Gradients run_backward(const Tensor& grad_output, const Tensor& hidden, const Tensor& expert_index,
                       const Tensor& expert_weight, const Tensor& gate_up, const Tensor& down,
                       const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                       const OptionalTensor& kept, const Wanted& wanted,
                       const GateOptions& options) {
  check_moe_experts(hidden, expert_index, expert_weight, gate_up, down, gate_up_bias, down_bias,
                    options.activation, options.is_gated, options.alpha, options.limit);
  check_moe_experts_backward(grad_output, hidden, expert_index, gate_up, down, kept);
  const Routing routing = route(expert_index, gate_up.size(0));
  const auto dtype = hidden.scalar_type();
  const int64_t tokens = hidden.size(0), top_k = expert_index.size(1);
  const Tensor none = at::empty({0}, hidden.options());
  const Tensor rows = gather(hidden, routing, top_k);
  const Tensor projected =
      (kept.has_value() ? kept->contiguous() : Layer{gate_up, gate_up_bias}.project(rows, routing))
          .narrow(0, 0, routing.rows());
  const Tensor grad = gather(grad_output, routing, top_k);
  const GroupMatrices up_matrices(gate_up), down_matrices(down);

  std::vector<Product> products;
  const Tensor grad_activated = new_tensor({rows.size(0), down.size(2)}, hidden.options());
  add_grad_rows(products, grad_activated, grad, down_matrices, routing.starts);
  const bool has_bias_part = down_bias.has_value() && wanted.expert_weight;
  const Tensor bias_part = has_bias_part ? new_tensor({rows.size(0), 1}, hidden.options()) : none;
  if (has_bias_part) {
    const GroupMatrices bias_matrices(down_bias->unsqueeze(1));
    add_forward(products, bias_part, grad, bias_matrices, std::nullopt, routing.starts);
  }
  multiply_all(products, dtype);

  const Tensor weights = weights_of_rows(in_compute_type(expert_weight, hidden), routing);
  const auto [weighted, grad_weight_of_rows, grad_projected] =
      activate_backward(projected, grad_activated, weights, options);
  if (has_bias_part) grad_weight_of_rows.add_(bias_part.squeeze(1));

  products.clear();
  const auto make = [&](bool is_wanted, auto allocate) { return is_wanted ? allocate() : none; };
  const Tensor grad_rows =
      make(wanted.hidden, [&] { return new_tensor(rows.sizes(), rows.options()); });
  const Tensor grad_gate_up = make(wanted.gate_up, [&] { return make_grad_matrices(gate_up); });
  const Tensor grad_down = make(wanted.down, [&] { return make_grad_matrices(down); });
  const Tensor grad_gate_up_bias = make(wanted.gate_up_bias, [&] {
    return new_tensor({gate_up.size(0), gate_up.size(1)}, hidden.options());
  });
  const Tensor grad_down_bias = make(
      wanted.down_bias, [&] { return new_tensor({down.size(0), down.size(1)}, hidden.options()); });
  const Tensor one = at::ones({1}, hidden.options()), rounded_weights = weights.to(dtype);
  const Starts starts = routing.starts;
  if (wanted.hidden) add_grad_rows(products, grad_rows, grad_projected, up_matrices, starts);
  if (wanted.gate_up) add_grad_matrices(products, grad_gate_up, grad_projected, rows, starts);
  if (wanted.down) add_grad_matrices(products, grad_down, grad, weighted, starts);
  if (wanted.gate_up_bias) add_grad_bias(products, grad_gate_up_bias, grad_projected, one, starts);
  if (wanted.down_bias) add_grad_bias(products, grad_down_bias, grad, rounded_weights, starts);
  multiply_all(products, dtype);

  return {wanted.hidden ? combine(grad_rows, routing, tokens, top_k, std::nullopt) : none,
          wanted.expert_weight ? grad_of_weights(grad_weight_of_rows, routing, expert_weight)
                               : at::empty({0}, expert_weight.options()),
          grad_gate_up,
          grad_down,
          grad_gate_up_bias,
          grad_down_bias};
}

Gradients moe_experts_training_backward(
    const Tensor& grad_output, const Tensor& hidden, const Tensor& expert_index,
    const Tensor& expert_weight, const Tensor& gate_up, const Tensor& down,
    const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, const Tensor& projected,
    bool hidden_requires_grad, bool expert_weight_requires_grad, bool gate_up_requires_grad,
    bool down_requires_grad, bool gate_up_bias_requires_grad, bool down_bias_requires_grad,
    std::string_view activation, bool is_gated, bool is_interleaved, double alpha,
    std::optional<double> limit, double up_offset) {
  return run_backward(grad_output, hidden, expert_index, expert_weight, gate_up, down, gate_up_bias,
                      down_bias, projected,
                      {hidden_requires_grad, expert_weight_requires_grad, gate_up_requires_grad,
                       down_requires_grad, gate_up_bias_requires_grad, down_bias_requires_grad},
                      {activation, is_gated, is_interleaved, alpha, limit, up_offset});
}

Gradients moe_experts_backward(const Tensor& grad_output, const Tensor& hidden,
                               const Tensor& expert_index, const Tensor& expert_weight,
                               const Tensor& gate_up, const Tensor& down,
                               const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                               bool hidden_requires_grad, bool expert_weight_requires_grad,
                               bool gate_up_requires_grad, bool down_requires_grad,
                               bool gate_up_bias_requires_grad, bool down_bias_requires_grad,
                               std::string_view activation, bool is_gated, bool is_interleaved,
                               double alpha, std::optional<double> limit, double up_offset) {
  return run_backward(grad_output, hidden, expert_index, expert_weight, gate_up, down, gate_up_bias,
                      down_bias, std::nullopt,
                      {hidden_requires_grad, expert_weight_requires_grad, gate_up_requires_grad,
                       down_requires_grad, gate_up_bias_requires_grad, down_bias_requires_grad},
                      {activation, is_gated, is_interleaved, alpha, limit, up_offset});
}

void check_tokens(const Tensor& hidden, const Tensor& expert_index, const Tensor& expert_weight) {
  check_dtype(kName, "hidden", hidden);
  check_dimensions(kName, "hidden", hidden, 2, "(T, K)");
  check_dimensions(kName, "expert_index", expert_index, 2, "(T, top_k)");
  check_dimensions(kName, "expert_weight", expert_weight, 2, "(T, top_k)");
  for (const auto& [argument, tensor] :
       {std::pair("expert_index", expert_index), {"expert_weight", expert_weight}}) {
    TORCH_CHECK_VALUE(tensor.device() == hidden.device(), kName, ": ", argument, " must be on ",
                      hidden.device(), " as hidden is, got ", tensor.device());
    check_count(kName, argument, "rows", tensor.sym_size(0), hidden.sym_size(0), "hidden has");
  }
  check_count(kName, "expert_weight", "columns", expert_weight.sym_size(1),
              expert_index.sym_size(1), "expert_index has");
  TORCH_CHECK_TYPE(
      expert_index.scalar_type() == at::kInt || expert_index.scalar_type() == at::kLong, kName,
      ": expert_index must be int32 or int64, got ", dtype_name(expert_index.scalar_type()));
  const auto dtype = expert_weight.scalar_type();
  TORCH_CHECK_TYPE(dtype == hidden.scalar_type() || dtype == at::kFloat, kName,
                   ": expert_weight must be float32, or ", dtype_name(hidden.scalar_type()),
                   " as hidden is, got ", dtype_name(dtype));
}

// `columns` are those of down.
void check_pair(const Tensor& gate_up, const Tensor& down, const c10::SymInt& columns,
                bool is_gated) {
  TORCH_CHECK_VALUE(!is_gated || holds((gate_up.sym_size(1) % 2).sym_eq(0)), kName,
                    ": gate_up must have an even number of rows, gates and their factors, got ",
                    gate_up.sym_size(1));
  check_count(kName, "down", "matrices", down.sym_size(0), gate_up.sym_size(0), "gate_up has");
  const c10::SymInt activated = is_gated ? gate_up.sym_size(1) / 2 : gate_up.sym_size(1);
  check_one_each(kName, "down", "columns", columns, activated,
                 is_gated ? "two rows of gate_up" : "row of gate_up");
}

void check_biases(const Tensor& hidden, const Tensor& gate_up, const Tensor& down,
                  const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias) {
  for (const auto& [argument, bias, of, matrices] :
       {std::tuple("gate_up_bias", gate_up_bias, "gate_up", gate_up),
        {"down_bias", down_bias, "down", down}}) {
    if (!bias.has_value()) continue;
    check_like(kName, argument, *bias, "hidden", hidden);
    check_group_bias(kName, argument, *bias, of, matrices);
  }
}

// Two weights of 4 bits share a byte.
c10::SymInt steps_of(const Tensor& weight, const Tensor& scale, const OptionalTensor& zero) {
  const bool is_shared = zero.has_value() || QuantizedWeights::is_exponent(scale);
  return is_shared ? 2 * weight.sym_size(2) : weight.sym_size(2);
}

// Checks weights of 8 bits, with a scale for each row or group of steps: integers, or bytes without
// sign, which are codes of float8_e4m3fn; of 4 bits, with scale and zero for each group; or of
// MXFP4, with an exponent for each group.
void check_integers(const char* argument, const Tensor& weight, const Tensor& scale,
                    const OptionalTensor& zero, const Tensor& hidden) {
  const bool are_mxfp4 = !zero.has_value() && QuantizedWeights::is_exponent(scale);
  const bool is_shared = zero.has_value() || are_mxfp4;
  const bool has_groups = is_shared || scale.dim() == 3;
  const std::string scale_name = std::string(argument) + "_scale";
  const std::string zero_name = std::string(argument) + "_zero";
  const bool are_fp8 = !is_shared && weight.scalar_type() == at::kByte;
  const at::ScalarType dtype = is_shared || are_fp8 ? at::kByte : at::kChar;
  check_dimensions(kName, argument, weight, 3, is_shared ? "(E, N, K / 2)" : "(E, N, K)");
  TORCH_CHECK_VALUE(weight.device() == hidden.device(), kName, ": ", argument, " must be on ",
                    hidden.device(), " as hidden is, got ", weight.device());
  TORCH_CHECK_TYPE(weight.scalar_type() == dtype, kName, ": ", argument, " must be ",
                   dtype_name(dtype),
                   are_mxfp4   ? " with exponents"
                   : is_shared ? " with zeros"
                               : " or uint8 without zeros",
                   ", got ", dtype_name(weight.scalar_type()));
  if (are_mxfp4) {
    check_exponents(kName, scale_name.c_str(), scale, 3, "(E, N, K / 32)", "hidden", hidden);
  } else {
    TORCH_CHECK_VALUE(has_groups || scale.dim() == 2, kName, ": ", scale_name,
                      " must have 2 dimensions (E, N) or 3 (E, N, K / group_size), got ",
                      scale.dim());
    check_dimensions(kName, scale_name.c_str(), scale, has_groups ? 3 : 2,
                     "(E, N, K / group_size)");
    if (are_fp8) {
      check_wide_scale(kName, scale_name.c_str(), scale, "hidden", hidden);
    } else {
      check_like(kName, scale_name.c_str(), scale, "hidden", hidden);
    }
  }
  const std::string has = std::string(argument) + " has";
  check_count(kName, scale_name.c_str(), "matrices", scale.sym_size(0), weight.sym_size(0),
              has.c_str());
  check_count(kName, scale_name.c_str(), "rows", scale.sym_size(1), weight.sym_size(1),
              has.c_str());
  if (!has_groups) return;
  const c10::SymInt steps = steps_of(weight, scale, zero), groups = scale.sym_size(2);
  if (are_mxfp4) {
    TORCH_CHECK_VALUE(holds((groups * kMxfp4GroupSize).sym_eq(steps)), kName, ": ", scale_name,
                      " must have a column for each ", kMxfp4GroupSize, " of the ", steps,
                      " steps of ", argument, ", got ", groups);
    return;
  }
  check_groups(kName, scale_name.c_str(), groups, steps, std::string("steps of ") + argument);
  if (!zero.has_value()) return;
  check_like(kName, zero_name.c_str(), *zero, "hidden", hidden);
  TORCH_CHECK_VALUE(zero->dim() == 3 && have_sizes(zero->sym_sizes(), scale.sym_sizes()), kName,
                    ": ", zero_name, " must have the shape ", scale.sym_sizes(), " of ", scale_name,
                    ", got ", zero->sym_sizes());
}

}  // namespace

void check_moe_experts(const Tensor& hidden, const Tensor& expert_index,
                       const Tensor& expert_weight, const Tensor& gate_up, const Tensor& down,
                       const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                       std::string_view activation, bool is_gated, double alpha,
                       std::optional<double> limit) {
  check_tokens(hidden, expert_index, expert_weight);
  check_dimensions(kName, "gate_up", gate_up, 3, is_gated ? "(E, 2 N, K)" : "(E, N, K)");
  check_like(kName, "gate_up", gate_up, "hidden", hidden);
  check_count(kName, "gate_up", "columns", gate_up.sym_size(2), hidden.sym_size(1), "hidden has");
  check_dimensions(kName, "down", down, 3, "(E, L, N)");
  check_like(kName, "down", down, "hidden", hidden);
  check_pair(gate_up, down, down.sym_size(2), is_gated);
  check_biases(hidden, gate_up, down, gate_up_bias, down_bias);
  check_gate(kName, {activation, is_gated, false, alpha, limit, 0.0});
}

void check_moe_experts_quantized(const Tensor& hidden, const Tensor& expert_index,
                                 const Tensor& expert_weight, const Tensor& gate_up,
                                 const Tensor& gate_up_scale, const OptionalTensor& gate_up_zero,
                                 const Tensor& down, const Tensor& down_scale,
                                 const OptionalTensor& down_zero,
                                 const OptionalTensor& gate_up_bias,
                                 const OptionalTensor& down_bias, std::string_view activation,
                                 bool is_gated, double alpha, std::optional<double> limit) {
  check_tokens(hidden, expert_index, expert_weight);
  check_integers("gate_up", gate_up, gate_up_scale, gate_up_zero, hidden);
  check_integers("down", down, down_scale, down_zero, hidden);
  check_count(kName, "gate_up", "columns", steps_of(gate_up, gate_up_scale, gate_up_zero),
              hidden.sym_size(1), "hidden has");
  check_pair(gate_up, down, steps_of(down, down_scale, down_zero), is_gated);
  check_biases(hidden, gate_up, down, gate_up_bias, down_bias);
  check_gate(kName, {activation, is_gated, false, alpha, limit, 0.0});
}

void check_moe_experts_backward(const Tensor& grad_output, const Tensor& hidden,
                                const Tensor& expert_index, const Tensor& gate_up,
                                const Tensor& down, const OptionalTensor& projected) {
  const char* const name = "moe_experts_backward";
  check_dimensions(name, "grad_output", grad_output, 2, "(T, K)");
  check_like(name, "grad_output", grad_output, "hidden", hidden);
  check_count(name, "grad_output", "rows", grad_output.sym_size(0), hidden.sym_size(0),
              "hidden has");
  check_one_each(name, "grad_output", "columns", grad_output.sym_size(1), down.sym_size(1),
                 "row of down");
  if (projected.has_value()) {
    check_dimensions(name, "projected", *projected, 2, "(T top_k, 2 N)");
    check_like(name, "projected", *projected, "hidden", hidden);
    check_one_each(name, "projected", "rows", projected->sym_size(0),
                   expert_index.sym_size(0) * expert_index.sym_size(1), "element of expert_index");
    check_one_each(name, "projected", "columns", projected->sym_size(1), gate_up.sym_size(1),
                   "row of gate_up");
  }
}

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_shared_kernel<"foo::moe_experts", &moe_experts>(library);
  register_shared_kernel<"foo::moe_experts_quantized", &moe_experts_quantized>(library);
  register_shared_kernel<"foo::moe_experts_training", &moe_experts_training>(library);
  register_shared_kernel<"foo::moe_experts_backward", &moe_experts_backward>(library);
  register_shared_kernel<"foo::moe_experts_training_backward", &moe_experts_training_backward>(
      library);
}

}  // namespace foo
