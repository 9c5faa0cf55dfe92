// foo::attention and foo::attention_varlen: the checks, which fake kernels share.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace foo {

// The arguments that follow the tensors. attention_varlen has no is_causal.
struct AttentionOptions {
  bool is_causal = false;
  std::optional<double> scale;
  double dropout_p = 0.0;
  int64_t window_left = -1;
  int64_t window_right = -1;
  double softcap = 0.0;
};

// The tensors of foo::attention.
struct AttentionInputs {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const std::optional<at::Tensor>& attn_bias;
  const std::optional<at::Tensor>& alibi_slopes;
  const std::optional<at::Tensor>& sinks;
};

// The tensors of foo::attention_varlen.
struct PackedInputs {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const at::Tensor& cu_seqlens_q;
  const at::Tensor& cu_seqlens_k;
  const std::optional<at::Tensor>& seqused_k;
  const std::optional<at::Tensor>& block_table;
  const std::optional<at::Tensor>& alibi_slopes;
  const std::optional<at::Tensor>& sinks;
};

// Raise for arguments that the operators do not take. ``name`` is that of the operator, where
// several have a check in common. They read only metadata, so that they serve
// eager tensors, and fake ones with symbolic sizes, alike.
void check_attention(const AttentionInputs& inputs, const AttentionOptions& options);
void check_attention_varlen(const PackedInputs& inputs, const AttentionOptions& options);

// Raises for sequences and blocks that are not inside the tensors. It reads the elements of the
// tensors of integers; the other arguments have been checked.
void check_attention_sequences(const PackedInputs& inputs, const c10::SymInt& max_seqlen_q,
                               const c10::SymInt& max_seqlen_k);

// The same for what the forward pass of an operator has returned, and gradients of that.
void check_attention_results(const char* name, const at::Tensor& grad_output,
                             const at::Tensor& grad_logsumexp, const at::Tensor& query,
                             const at::Tensor& value, const at::Tensor& output,
                             const at::Tensor& logsumexp);

// Only a bias of floating-point numbers has a gradient.
void check_attention_bias(const std::optional<at::Tensor>& attn_bias, bool bias_requires_grad);

// Dropout needs a seed, and nothing else does.
void check_attention_seed(const char* name, const at::Tensor& query,
                          const std::optional<at::Tensor>& seed, double dropout_p);

}  // namespace foo
