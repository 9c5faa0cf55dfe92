// foo::attention_int8_cache: the checks, which the fake kernel shares.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

namespace foo {

// Raises for arguments that the operator does not take. Reads only metadata.
void check_attention_int8_cache(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const at::Tensor& key_scale,
                                const at::Tensor& value_scale,
                                const std::optional<at::Tensor>& sinks,
                                const std::optional<at::Tensor>& seqused_k,
                                const std::optional<at::Tensor>& block_table,
                                const c10::SymInt& window_left, const c10::SymInt& window_right,
                                double softcap);

}  // namespace foo
