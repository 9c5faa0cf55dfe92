// Draws the next token of each sequence from a model's scores.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace foo::graphs {

// How scores become probabilities, in this order. The defaults change nothing.
//   repetition_penalty  divides positive scores of tokens that occur already, multiplies others
//   temperature         divides all scores
//   top_k               keeps the tokens whose scores are no less than the k largest; 0 for all
//   top_p               keeps the fewest likely tokens whose probabilities exceed it, ...
//   least               ... but at least as many
struct Sampling {
  double repetition_penalty = 1.0;
  double temperature = 1.0;
  int64_t top_k = 0;
  double top_p = 1.0;
  int64_t least = 1;
};

// Draws as torch.multinomial does from the softmax, with the same numbers of the CPU's generator:
// for each token an exponential random number, of which the token needs the least for its
// probability. Most of these are drawn, but not computed, since few tokens are left.
//   scores  (B, V) float32, contiguous, on the CPU; overwritten
//   tokens  (B, S) int64: the sequences so far
// Returns (B,) int64. Throws a RuntimeError as torch.multinomial does if probabilities are NaN.
at::Tensor sample_tokens(const at::Tensor& scores, const at::Tensor& tokens,
                         const Sampling& sampling);

}  // namespace foo::graphs
