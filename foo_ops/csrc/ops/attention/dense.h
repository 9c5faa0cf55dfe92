// What dense calls of attention have in common.

#pragma once

#include <vector>

#include "ops/attention/checks.h"
#include "ops/attention/parameters.h"
#include "ops/attention/plan.h"

namespace foo {

// Sizes and inputs of a call whose tensors are (batch, heads, length, head_dim).
Parameters make_parameters(const AttentionInputs& inputs);

std::vector<Sequence> sequences_of(const Parameters& parameters);

// Heads and rows lie in memory as query's do, so that a model which transposed them for attention
// can transpose them back and view the result.
at::Tensor make_output(const at::Tensor& query, int64_t value_dim);

at::Tensor make_logsumexp(const at::Tensor& query);

}  // namespace foo
