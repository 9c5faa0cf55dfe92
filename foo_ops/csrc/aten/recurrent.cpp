// The cells of LSTM and GRU. torch computes them from smaller operators on the CPU only; a device
// like foo has operators for the whole cell.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/zeros_like.h>

#include <tuple>

#include "aten/host_call.h"
#include "launch/operator_counts.h"

namespace foo::aten {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

OptionalTensor to_host(HostCall& call, const OptionalTensor& tensor) {
  if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
  return call.to_host(*tensor);
}

at::Tensor add_bias(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() ? gates + *bias : gates;
}

at::Tensor bias_gradient(const at::Tensor& grad_gates, bool has_bias) {
  return has_bias ? grad_gates.sum(0) : at::Tensor();
}

// The workspace holds what the backward pass needs: the four gates after their activation.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates,
                                                         const at::Tensor& hidden_gates,
                                                         const at::Tensor& cx,
                                                         const OptionalTensor& input_bias,
                                                         const OptionalTensor& hidden_bias) {
  HostCall call(input_gates.device());
  at::Tensor gates = add_bias(call.to_host(input_gates), to_host(call, input_bias)) +
                     add_bias(call.to_host(hidden_gates), to_host(call, hidden_bias));
  const auto parts = gates.chunk(4, 1);
  const at::Tensor input = parts[0].sigmoid_();
  const at::Tensor forget = parts[1].sigmoid_();
  const at::Tensor cell = parts[2].tanh_();
  const at::Tensor output = parts[3].sigmoid_();
  const at::Tensor cy = forget * call.to_host(cx) + input * cell;
  const at::Tensor hy = output * cy.tanh();
  return {call.to_foo(hy), call.to_foo(cy), call.to_foo(gates)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const at::Tensor& cx,
    const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  HostCall call(cx.device());
  const auto parts = call.to_host(workspace).chunk(4, 1);
  const at::Tensor &input = parts[0], &forget = parts[1], &cell = parts[2], &output = parts[3];
  const at::Tensor tanh_cy = call.to_host(cy).tanh();

  const auto host_grad_hy = to_host(call, grad_hy).value_or(at::zeros_like(tanh_cy));
  const auto host_grad_cy = to_host(call, grad_cy).value_or(at::zeros_like(tanh_cy));
  const at::Tensor grad_cell_state =
      at::tanh_backward(host_grad_hy * output, tanh_cy) + host_grad_cy;
  const at::Tensor grad_gates =
      at::cat({at::sigmoid_backward(grad_cell_state * cell, input),
               at::sigmoid_backward(grad_cell_state * call.to_host(cx), forget),
               at::tanh_backward(grad_cell_state * input, cell),
               at::sigmoid_backward(host_grad_hy * tanh_cy, output)},
              1);
  return {call.to_foo(grad_gates), call.to_foo(grad_cell_state * forget),
          call.to_foo(bias_gradient(grad_gates, has_bias))};
}

// The workspace holds reset, update and new gate, the old state, and the hidden part of the new
// gate.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates,
                                            const at::Tensor& hidden_gates, const at::Tensor& hx,
                                            const OptionalTensor& input_bias,
                                            const OptionalTensor& hidden_bias) {
  HostCall call(input_gates.device());
  const auto input_parts =
      add_bias(call.to_host(input_gates), to_host(call, input_bias)).chunk(3, 1);
  const auto hidden_parts =
      add_bias(call.to_host(hidden_gates), to_host(call, hidden_bias)).chunk(3, 1);
  const at::Tensor state = call.to_host(hx);
  const at::Tensor reset = (input_parts[0] + hidden_parts[0]).sigmoid_();
  const at::Tensor update = (input_parts[1] + hidden_parts[1]).sigmoid_();
  const at::Tensor fresh = (input_parts[2] + reset * hidden_parts[2]).tanh_();
  const at::Tensor hy = (state - fresh) * update + fresh;
  return {call.to_foo(hy), call.to_foo(at::cat({reset, update, fresh, state, hidden_parts[2]}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  HostCall call(grad_hy.device());
  const auto parts = call.to_host(workspace).chunk(5, 1);
  const at::Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &state = parts[3],
                   &hidden = parts[4];
  const at::Tensor grad = call.to_host(grad_hy);

  const at::Tensor grad_fresh = at::tanh_backward(grad * (1 - update), fresh);
  const at::Tensor grad_update = at::sigmoid_backward(grad * (state - fresh), update);
  const at::Tensor grad_reset = at::sigmoid_backward(grad_fresh * hidden, reset);
  const at::Tensor grad_input_gates = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const at::Tensor grad_hidden_gates = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {call.to_foo(grad_input_gates), call.to_foo(grad_hidden_gates), call.to_foo(grad * update),
          call.to_foo(bias_gradient(grad_input_gates, has_bias)),
          call.to_foo(bias_gradient(grad_hidden_gates, has_bias))};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_thnn_fused_lstm_cell", &lstm_cell>(library);
  register_own_kernel<"aten::_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward>(library);
  register_own_kernel<"aten::_thnn_fused_gru_cell", &gru_cell>(library);
  register_own_kernel<"aten::_thnn_fused_gru_cell_backward", &gru_cell_backward>(library);
}

}  // namespace foo::aten
