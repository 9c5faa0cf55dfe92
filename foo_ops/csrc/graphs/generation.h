// Sequences of tokens, and a program that appends to them without Python.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "graphs/program.h"
#include "graphs/sampling.h"

namespace foo::graphs {

// A batch of sequences of one length. A sequence that has ended gets padding.
class Sequences {
 public:
  // `prompt` is (B, S) int64; a token among `ends` ends its sequence.
  Sequences(const at::Tensor& prompt, std::vector<int64_t> ends, int64_t padding,
            const Sampling& sampling);

  // Appends a token to each sequence, chosen by `logits`, (B, T, V) or (B, V), of which the last
  // are read.
  void append(const at::Tensor& logits);

  int64_t length() const { return length_; }
  // Whether a sequence has not ended.
  bool goes_on() const;
  // Returns all tokens so far, (B, length). They share the memory of the sequences.
  at::Tensor tokens() const { return tokens_.narrow(1, 0, length_); }
  // Makes `view` the same tensor; one that nothing else holds is used again.
  void show(at::Tensor& view) const;

 private:
  at::Tensor tokens_;
  int64_t length_;
  std::vector<char> is_unfinished_;
  std::vector<int64_t> ends_;
  int64_t padding_;
  Sampling sampling_;
};

// A program for one token, whose results are inputs of the next run.
struct Loop {
  // Numbers of the inputs that are replaced, and the outputs that replace them.
  std::vector<std::pair<size_t, size_t>> feeds;
  // The number of the input that is all tokens so far.
  std::optional<size_t> tokens;
  // The number of the output that chooses the next tokens.
  size_t logits;
};

// How many tokens a loop has run, and the last one's outputs.
struct Progress {
  int64_t count = 0;
  std::vector<at::Tensor> outputs;
};

// Runs a program for up to `most` tokens, from a position on, until all sequences have ended or the
// program declines. Calls `between_tokens` before each but the first. `progress` is right after an
// exception, too.
void run_loop(const Program& program, const Loop& loop, int64_t position,
              std::vector<at::Tensor> inputs, Sequences& sequences, int64_t most,
              const std::function<void()>& between_tokens, Progress& progress);

}  // namespace foo::graphs
