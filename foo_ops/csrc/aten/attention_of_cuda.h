// The operators of attention that torch has for CUDA alone: common to flash, efficient and cuDNN's.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "aten/attention_operators.h"

namespace foo::aten {

using ThreeGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Output, logsumexp, lengths of packed sequences (none here), longest query and key, seed, offset,
// mask for debugging.
using ScaledDotProduct = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt,
                                    c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

// Raise where torch's operator would, or foo's cannot do what is asked for. The name is the
// operator's, for messages.
void check_dtypes(const char* name, const at::Tensor& query, const at::Tensor& key,
                  const at::Tensor& value, bool takes_float32);
void check_dimensions(const char* name, const at::Tensor& query, const at::Tensor& key,
                      const at::Tensor& value, int64_t expected);
void check_no_debug_mask(const char* name, bool return_debug_mask);
void check_none(const char* name, const char* argument, const OptionalTensor& tensor,
                const char* why);

// One number of the device's default generator; without dropout nobody reads it.
at::Tensor draw_seed(const at::Tensor& query, double dropout_p);
OptionalTensor seed_if_used(const at::Tensor& seed, double dropout_p);

// Philox's seed and offset as efficient and cuDNN's attention return them: two numbers.
at::Tensor scalar_of(const at::Tensor& seed);
at::Tensor zero_offset(const at::Tensor& seed);

inline at::Tensor heads_first(const at::Tensor& tensor) {
  return tensor.transpose(1, 2);
}

}  // namespace foo::aten
