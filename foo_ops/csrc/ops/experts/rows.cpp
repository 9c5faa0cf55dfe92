#include "ops/experts/rows.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "launch/jobs.h"
#include "launch/kernel_table.h"
#include "launch/memory.h"

namespace foo {

namespace {

// Elements of a job: fewer take less time than a thread takes to wake up.
constexpr int64_t kElementsOfJob = 1 << 15;

constexpr std::array<std::string_view, 5> kActivations = {"relu", "relu2", "silu", "gelu",
                                                          "gelu_tanh"};

// Kernels with a common name, one for each activation.
struct Kernels {
  explicit Kernels(const std::string& name) {
    for (const auto& activation : kActivations) {
      of_activations.push_back(std::make_unique<Kernel>(name + "." + std::string(activation)));
    }
  }
  Kernel& operator[](std::string_view activation) const {
    const auto* found = std::find(kActivations.begin(), kActivations.end(), activation);
    return *of_activations[found - kActivations.begin()];
  }

  std::vector<std::unique_ptr<Kernel>> of_activations;
};

Kernels& gate_kernels() {
  static auto* kernels = new Kernels("experts_gate");
  return *kernels;
}

Kernels& gate_gradient_kernels() {
  static auto* kernels = new Kernels("experts_gate_gradient");
  return *kernels;
}

Kernel& combine_kernel() {
  static auto* kernel = new Kernel("experts_combine");
  return *kernel;
}

// Runs a kernel on ranges of rows, of `width` elements each.
template <class Parameters>
void run_rows(const Parameters& parameters,
              void (*kernel)(const Parameters*, const RowRange*, void*, int64_t*), int64_t rows,
              int64_t width) {
  if (rows == 0) return;
  const int64_t range = std::max<int64_t>(1, kElementsOfJob / std::max<int64_t>(1, width));
  run_jobs(parameters, kernel, (rows + range - 1) / range, RowRange{0, std::min(range, rows)},
           [&](int64_t job, int64_t, const auto& call) {
             call(RowRange{job * range, std::min((job + 1) * range, rows)});
           });
}

Gate make_gate(const at::Tensor& projected, const GateOptions& options) {
  const int64_t width = projected.size(1), columns = activated_columns(options, width);
  return {.columns = columns,
          .is_gated = options.is_gated,
          .step = options.is_gated && options.is_interleaved ? 2 : 1,
          .up = options.is_interleaved ? 1 : columns,
          .projected_stride = width,
          .alpha = options.alpha,
          .limit = options.limit.value_or(std::numeric_limits<double>::infinity()),
          .up_offset = options.up_offset,
          .projected = projected.const_data_ptr(),
          .activated = nullptr,
          .grad_activated = nullptr,
          .weight = nullptr,
          .grad_weight = nullptr,
          .grad_projected = nullptr};
}

template <class Index>
Routing route_by(const at::Tensor& expert_index, int64_t experts) {
  Routing routing;
  const at::Tensor index = read_once(expert_index);
  const auto* const values = index.const_data_ptr<Index>();
  const int64_t choices = index.numel();
  routing.places.assign(values, values + choices);
  routing.starts.assign(experts + 1, 0);
  for (const int64_t expert : routing.places) {
    TORCH_CHECK_INDEX(0 <= expert && expert <= experts, "moe_experts: expert_index must be in [0, ",
                      experts, "), or ", experts, " for no expert, got ", expert);
    if (expert < experts) ++routing.starts[expert + 1];
  }
  for (int64_t expert = 0; expert < experts; ++expert) {
    routing.starts[expert + 1] += routing.starts[expert];
  }
  routing.choices.resize(routing.rows());
  std::vector<int64_t> next(routing.starts.begin(), routing.starts.end());
  for (int64_t choice = 0; choice < choices; ++choice) {
    const int64_t expert = routing.places[choice];
    routing.places[choice] = expert < experts ? next[expert]++ : -1;
    if (expert < experts) routing.choices[routing.places[choice]] = choice;
  }
  return routing;
}

}  // namespace

Routing route(const at::Tensor& expert_index, int64_t experts) {
  return expert_index.scalar_type() == at::kInt ? route_by<int32_t>(expert_index, experts)
                                                : route_by<int64_t>(expert_index, experts);
}

void check_gate(const char* name, const GateOptions& options) {
  const auto is_known =
      std::find(kActivations.begin(), kActivations.end(), options.activation) != kActivations.end();
  TORCH_CHECK_VALUE(is_known, name,
                    ": activation must be relu, relu2, silu, gelu or gelu_tanh, got ",
                    options.activation);
  TORCH_CHECK_VALUE(options.alpha == 1.0 || options.activation == "silu", name,
                    ": alpha must be 1 for ", options.activation, ", got ", options.alpha);
  TORCH_CHECK_VALUE(!options.limit.has_value() || *options.limit > 0.0, name,
                    ": limit must be positive, got ", options.limit.value_or(0.0));
}

at::Tensor gather(const at::Tensor& tokens, const Routing& routing, int64_t top_k) {
  const at::Tensor source = tokens.contiguous();
  const int64_t width = source.size(1);
  const at::Tensor rows = new_tensor({routing.rows(), width}, source.options());
  const int64_t bytes = width * source.itemsize();
  const auto* const from = static_cast<const char*>(source.const_data_ptr());
  auto* const to = static_cast<char*>(rows.mutable_data_ptr());
  share_steps(routing.rows(), static_cast<double>(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memcpy(to + row * bytes, from + routing.choices[row] / top_k * bytes, bytes);
    }
  });
  return rows;
}

at::Tensor activate(const at::Tensor& projected, const GateOptions& options) {
  Gate gate = make_gate(projected, options);
  const at::Tensor activated = new_tensor({projected.size(0), gate.columns}, projected.options());
  gate.activated = activated.mutable_data_ptr();
  auto* const kernel =
      gate_kernels()[options.activation].get<GateFunction>(projected.scalar_type());
  run_rows(gate, kernel, projected.size(0), projected.size(1));
  return activated;
}

GateGradients activate_backward(const at::Tensor& projected, const at::Tensor& grad_activated,
                                const at::Tensor& weight, const GateOptions& options) {
  Gate gate = make_gate(projected, options);
  const GateGradients result{
      new_tensor(grad_activated.sizes(), projected.options()),
      new_tensor({projected.size(0)}, weight.options()),
      new_tensor(projected.sizes(), projected.options()),
  };
  gate.activated = result.weighted.mutable_data_ptr();
  gate.grad_activated = grad_activated.const_data_ptr();
  gate.weight = weight.const_data_ptr();
  gate.grad_weight = result.grad_weight.mutable_data_ptr();
  gate.grad_projected = result.grad_projected.mutable_data_ptr();
  auto* const kernel =
      gate_gradient_kernels()[options.activation].get<GateFunction>(projected.scalar_type());
  run_rows(gate, kernel, projected.size(0), 2 * projected.size(1));
  return result;
}

at::Tensor combine(const at::Tensor& rows, const Routing& routing, int64_t tokens, int64_t top_k,
                   const std::optional<at::Tensor>& weight) {
  const int64_t columns = rows.size(1);
  const at::Tensor output = new_tensor({tokens, columns}, rows.options());
  const Combine parameters{.columns = columns,
                           .top_k = top_k,
                           .has_weight = weight.has_value(),
                           .rows = rows.const_data_ptr(),
                           .place = routing.places.data(),
                           .weight = weight.has_value() ? weight->const_data_ptr() : nullptr,
                           .output = output.mutable_data_ptr()};
  auto* const kernel = combine_kernel().get<CombineFunction>(rows.scalar_type());
  run_rows(parameters, kernel, tokens, top_k * columns);
  return output;
}

}  // namespace foo
