// foo::attention_seeded and its backward, for PyTorch's operators that compute the same.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace foo::aten {

using OptionalTensor = std::optional<at::Tensor>;

// What such an operator may ask for.
struct AttentionOptions {
  bool is_causal;
  std::optional<double> scale;
  double dropout_p;
};

inline bool has_value(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Copies a result unless its dimensions lie in memory in the order of those of the query. torch
// promises this of the output, so that a model which transposed its heads to the front can
// transpose them back and view the output.
at::Tensor in_order_of(const at::Tensor& query, at::Tensor result);

// Returns the output and the logsumexp.
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value, const OptionalTensor& mask,
                                             const OptionalTensor& seed,
                                             const AttentionOptions& options);

struct AttentionGradients {
  at::Tensor query, key, value, mask;
};

AttentionGradients attention_backward(const at::Tensor& grad_output, const at::Tensor& query,
                                      const at::Tensor& key, const at::Tensor& value,
                                      const OptionalTensor& mask, const at::Tensor& output,
                                      const at::Tensor& logsumexp, const OptionalTensor& seed,
                                      bool mask_requires_grad, const AttentionOptions& options);

}  // namespace foo::aten
