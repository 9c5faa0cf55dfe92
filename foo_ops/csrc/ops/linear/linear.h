// foo::linear and the checks of linear layers.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>

namespace foo {

// Checks that linear layers share. They raise, and read only metadata.
void check_dtype(const char* name, const char* argument, const at::Tensor& tensor);
void check_rows(const char* name, const char* argument, const at::Tensor& tensor);
void check_dimensions(const char* name, const char* argument, const at::Tensor& tensor,
                      int64_t dimensions, const char* shape);
void check_like(const char* name, const char* argument, const at::Tensor& tensor, const char* of,
                const at::Tensor& like);
void check_count(const char* name, const char* argument, const char* what, const c10::SymInt& size,
                 const c10::SymInt& expected, const char* as);
// Like check_count, for counts of one thing for each of another, as in "row of weight".
void check_one_each(const char* name, const char* argument, const char* what,
                    const c10::SymInt& size, const c10::SymInt& expected, const char* each);

// Checks of the operators' arguments, which fake kernels share.
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
