// Calls of foo::attention_seeded, foo::attention_varlen_seeded and their backward operators, for
// PyTorch's operators that compute the same.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace foo::aten {

using OptionalTensor = std::optional<at::Tensor>;

// Options of such operators. Windows are those of foo::attention: -1 for none, and aligned to the
// last key.
struct AttentionOptions {
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;
  double dropout_p = 0.0;
  int64_t window_left = -1;
  int64_t window_right = -1;
  OptionalTensor alibi_slopes = std::nullopt;
};

inline bool has_value(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Copies a result unless its dimensions have the query's memory order. torch promises this for the
// output, so that a model that transposed its heads to the front can transpose them back and view
// the output.
at::Tensor in_order_of(const at::Tensor& query, at::Tensor result);

// Copies a result to new memory with the strides of torch.empty_like(query).
at::Tensor laid_out_like(const at::Tensor& query, const at::Tensor& result);

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

// Packed sequences, (total, heads, head dimension), and where each begins.
struct PackedSequences {
  at::Tensor starts_q, starts_k;
  int64_t longest_q, longest_k;
  // Number of keys that each sequence uses, and the blocks that hold them.
  OptionalTensor used_k = std::nullopt;
  OptionalTensor block_table = std::nullopt;
};

std::tuple<at::Tensor, at::Tensor> attention_varlen(const at::Tensor& query, const at::Tensor& key,
                                                    const at::Tensor& value,
                                                    const PackedSequences& sequences,
                                                    const OptionalTensor& seed,
                                                    const AttentionOptions& options);

AttentionGradients attention_varlen_backward(const at::Tensor& grad_output, const at::Tensor& query,
                                             const at::Tensor& key, const at::Tensor& value,
                                             const PackedSequences& sequences,
                                             const at::Tensor& output, const at::Tensor& logsumexp,
                                             const OptionalTensor& seed,
                                             const AttentionOptions& options);

}  // namespace foo::aten
