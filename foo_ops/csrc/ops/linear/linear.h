// foo::linear: its launcher, and what linear layers ask of their arguments.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>

namespace foo {

// What linear layers ask of their arguments. The checks read only metadata, and raise.

void check_dtype(const char* name, const char* argument, const at::Tensor& tensor);
void check_rows(const char* name, const char* argument, const at::Tensor& tensor);
void check_dimensions(const char* name, const char* argument, const at::Tensor& tensor,
                      int64_t dimensions, const char* shape);
void check_like(const char* name, const char* argument, const at::Tensor& tensor, const char* of,
                const at::Tensor& like);
void check_count(const char* name, const char* argument, const char* what, const c10::SymInt& size,
                 const c10::SymInt& expected, const char* as);

// foo::linear: the checks, which fake kernels share.

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
