// foo::flex_attention, foo::flex_attention_varlen and their gradients.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <vector>

namespace foo {

// Checks, which fake kernels share.
void check_flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::vector<at::Tensor>& captured,
                          const std::optional<at::Tensor>& kv_num_blocks,
                          const std::optional<at::Tensor>& kv_indices,
                          const std::optional<at::Tensor>& full_kv_num_blocks,
                          const std::optional<at::Tensor>& full_kv_indices,
                          const c10::SymInt& query_block, const c10::SymInt& key_block);

void check_captured(const char* name, const std::vector<at::Tensor>& captured,
                    const at::Tensor& query);

// Checks which gradients of captured tensors are required.
void check_captured_requirements(const char* name, const std::vector<at::Tensor>& captured,
                                 const std::vector<bool>& requires_grad);

void check_flex_attention_varlen(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const std::vector<at::Tensor>& captured,
                                 const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                 const std::optional<at::Tensor>& seqused_k,
                                 const std::optional<at::Tensor>& block_table);

}  // namespace foo
