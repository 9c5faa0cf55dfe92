// Draws the next token of each sequence from a model's scores.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace foo::graphs {

// How a token is chosen by its scores, which are changed in this order. The defaults change
// nothing.
//   is_greedy           the likeliest token is taken; only the next two change scores
//   repetition_penalty  divides positive scores of tokens that occur already, multiplies others
//   least_length        shorter sequences do not end
//   temperature         divides all scores
//   top_k               keeps the tokens whose scores are no less than the k largest; 0 for all
//   top_p               keeps the fewest likely tokens whose probabilities exceed it, ...
//   least               ... but at least as many
//   min_p               keeps the tokens whose probabilities are no less than it times the largest
struct Sampling {
  bool is_greedy = false;
  double repetition_penalty = 1.0;
  int64_t least_length = 0;
  double temperature = 1.0;
  int64_t top_k = 0;
  double top_p = 1.0;
  int64_t least = 1;
  double min_p = 0.0;
};

// Returns the next token of each sequence.
//   logits  (B, T, V) or (B, V), of which the last are read
//   tokens  int64, B contiguous rows that begin with the sequences so far
//   length  of the sequences
//   ends    tokens that end a sequence
//
// Samples are those of torch.multinomial from the softmax, with the same numbers of the CPU's
// default generator: for each token an exponential random number; the token whose probability is
// largest beside its number is drawn. Few tokens are left in the end, and only their numbers are
// computed. Throws torch.multinomial's RuntimeError if probabilities are NaN.
std::vector<int64_t> next_tokens(const at::Tensor& logits, const at::Tensor& tokens, int64_t length,
                                 const std::vector<int64_t>& ends, const Sampling& sampling);

}  // namespace foo::graphs
