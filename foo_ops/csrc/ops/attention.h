// foo::attention: the checks, which fake kernels share, and the launchers.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace foo {

// Arguments of foo::attention that follow its tensors.
struct AttentionOptions {
  double dropout_p;
  int64_t window_left;
  int64_t window_right;
  double softcap;
};

// Raises for arguments that foo::attention does not take. Reads only metadata, so that it serves
// eager tensors, and fake ones with symbolic sizes, alike.
void check_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& attn_bias,
                     const std::optional<at::Tensor>& alibi_slopes,
                     const std::optional<at::Tensor>& sinks, const AttentionOptions& options);

// The same for the operators that compute its gradients.
void check_attention_gradients(const at::Tensor& grad_output, const at::Tensor& grad_logsumexp,
                               const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const std::optional<at::Tensor>& attn_bias,
                               const at::Tensor& output, const at::Tensor& logsumexp);

}  // namespace foo
