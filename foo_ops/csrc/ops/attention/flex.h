// foo::flex_attention and its gradients: the checks, which fake kernels share.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace foo {

void check_flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::vector<at::Tensor>& captured,
                          const std::optional<at::Tensor>& kv_num_blocks,
                          const std::optional<at::Tensor>& kv_indices,
                          const std::optional<at::Tensor>& full_kv_num_blocks,
                          const std::optional<at::Tensor>& full_kv_indices, int64_t query_block,
                          int64_t key_block);

// For each captured tensor whether a gradient is asked for.
void check_flex_requirements(const std::vector<at::Tensor>& captured,
                             const std::vector<bool>& requires_grad);

}  // namespace foo
