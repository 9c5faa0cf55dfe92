// The gradients of attention, dense and packed.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "ops/attention/parameters.h"
#include "ops/attention/plan.h"
#include "ops/attention/programs.h"

namespace foo {

// The gradients for query, key, value, attn_bias, alibi_slopes and sinks; of size 0 for what was
// not given.
using AttentionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Runs the backward kernel on the blocks of all sequences; where programs change the scores, also
// for the tensors that these have captured. Tensors are (total, heads, dim) if they
// are packed, else (batch, heads, length, dim).
AttentionGradients run_backward(Parameters& parameters, const AttentionInputs& inputs,
                                const std::vector<Sequence>& sequences,
                                const AttentionOptions& options, bool attn_bias_requires_grad,
                                bool is_packed, ProgramCall* programs = nullptr);

}  // namespace foo
