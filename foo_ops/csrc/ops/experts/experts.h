// foo::moe_experts: the experts of a mixture, of all tokens.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace foo {

// Checks of the operators' arguments, which fake kernels share. They raise, and read only metadata.
void check_moe_experts(const at::Tensor& hidden, const at::Tensor& expert_index,
                       const at::Tensor& expert_weight, const at::Tensor& gate_up,
                       const at::Tensor& down, const std::optional<at::Tensor>& gate_up_bias,
                       const std::optional<at::Tensor>& down_bias, std::string_view activation,
                       bool is_gated, double alpha, std::optional<double> limit);
void check_moe_experts_quantized(
    const at::Tensor& hidden, const at::Tensor& expert_index, const at::Tensor& expert_weight,
    const at::Tensor& gate_up, const at::Tensor& gate_up_scale,
    const std::optional<at::Tensor>& gate_up_zero, const at::Tensor& down,
    const at::Tensor& down_scale, const std::optional<at::Tensor>& down_zero,
    const std::optional<at::Tensor>& gate_up_bias, const std::optional<at::Tensor>& down_bias,
    std::string_view activation, bool is_gated, double alpha, std::optional<double> limit);
void check_moe_experts_backward(const at::Tensor& grad_output, const at::Tensor& hidden,
                                const at::Tensor& expert_index, const at::Tensor& gate_up,
                                const at::Tensor& down, const std::optional<at::Tensor>& projected);

}  // namespace foo
