// foo::linear: the checks, which fake kernels share.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace foo {

// They raise for arguments that the operators do not take, and read only metadata.
void check_linear(const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias);
void check_linear_activation(const at::Tensor& input, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, std::string_view activation);
void check_linear_silu_mul(const at::Tensor& input, const at::Tensor& gate_weight,
                           const at::Tensor& up_weight);
void check_linear_backward(const at::Tensor& grad_output, const std::optional<at::Tensor>& input,
                           const std::optional<at::Tensor>& weight, bool input_requires_grad,
                           bool weight_requires_grad);

}  // namespace foo
