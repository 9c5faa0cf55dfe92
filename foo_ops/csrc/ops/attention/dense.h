// Helpers that dense calls of attention share.

#pragma once

#include <vector>

#include "ops/attention/arguments.h"
#include "ops/attention/plan.h"

namespace foo {

// Sets sizes and inputs of a call whose tensors are (batch, heads, length, head_dim).
Parameters make_parameters(const AttentionInputs& inputs);

std::vector<Sequence> sequences_of(const Parameters& parameters);

// Heads and rows have query's memory order, so that a model that transposed query can transpose the
// result back and view it.
at::Tensor make_output(const at::Tensor& query, int64_t value_dim);

at::Tensor make_logsumexp(const at::Tensor& query);

}  // namespace foo
