// Draws the next token of each sequence from a model's scores.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

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

// Returns the next token of each sequence, (B,) int64: the likeliest one, or a sample.
//   logits  (B, T, V) or (B, V), of which the last are read
//   tokens  (B, S) int64: the sequences so far
//
// Samples are those of torch.multinomial from the softmax, with the same numbers of the CPU's
// default generator: for each token an exponential random number; the token whose probability is
// largest beside its number is drawn. Few tokens are left in the end, and only their numbers are
// computed. Throws torch.multinomial's RuntimeError if probabilities are NaN.
at::Tensor next_tokens(const at::Tensor& logits, const at::Tensor& tokens,
                       const std::optional<Sampling>& sampling);

}  // namespace foo::graphs
