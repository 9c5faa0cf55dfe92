// foo::attention and foo::attention_varlen: the checks, which fake kernels share.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/attention/arguments.h"

namespace foo {

// The checks raise for arguments that the operators do not take. ``name`` is the operator's, where
// several have a check in common. They read only metadata, so that they serve eager tensors and
// fake ones with symbolic sizes alike.
void check_dense(const char* name, const AttentionInputs& inputs);
void check_attention(const AttentionInputs& inputs, const AttentionOptions& options);
void check_packed(const char* name, const AttentionInputs& inputs);
void check_attention_varlen(const AttentionInputs& inputs, const AttentionOptions& options);

// Raises for sequences and blocks that are not inside the tensors. It reads the elements of the
// tensors of integers; the other arguments have been checked.
void check_attention_sequences(const AttentionInputs& inputs, const AttentionOptions& options);

// Raises for outputs of a forward pass, and gradients of these, that do not fit its inputs.
void check_attention_results(const char* name, const at::Tensor& grad_output,
                             const at::Tensor& grad_logsumexp, const at::Tensor& query,
                             const at::Tensor& value, const at::Tensor& output,
                             const at::Tensor& logsumexp);

// Only a bias of floating-point numbers has a gradient.
void check_attention_bias(const std::optional<at::Tensor>& attn_bias, bool attn_bias_requires_grad);

// Dropout needs a seed, and nothing else does.
void check_attention_seed(const char* name, const at::Tensor& query,
                          const std::optional<at::Tensor>& seed, double dropout_p);

// The numbers of heads go with a seed.
void check_attention_dropout_heads(const char* name, const at::Tensor& query,
                                   const std::optional<at::Tensor>& dropout_heads,
                                   const c10::SymInt& batch);

}  // namespace foo
