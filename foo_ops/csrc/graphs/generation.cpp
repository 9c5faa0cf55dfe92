#include "graphs/generation.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "graphs/shortcuts.h"

namespace foo::graphs {
namespace {

// Tokens for which there is memory at first.
constexpr int64_t kRoom = 128;

// Returns memory for more tokens, which begin with these.
at::Tensor with_room(const at::Tensor& tokens, int64_t room) {
  const at::Tensor result = at::empty({tokens.size(0), tokens.size(1) + room}, tokens.options());
  result.narrow(1, 0, tokens.size(1)).copy_(tokens);
  return result;
}

}  // namespace

Sequences::Sequences(const at::Tensor& prompt, std::vector<int64_t> ends, int64_t padding,
                     const Sampling& sampling)
    : length_(0), ends_(std::move(ends)), padding_(padding), sampling_(sampling) {
  TORCH_CHECK_VALUE(prompt.dim() == 2 && prompt.scalar_type() == at::kLong && prompt.is_cpu(),
                    "Sequences: prompt must be int64 (B, S) on the CPU, got ", prompt.scalar_type(),
                    " ", prompt.sizes(), " on ", prompt.device());
  length_ = prompt.size(1);
  tokens_ = with_room(prompt, kRoom);
  is_unfinished_.assign(prompt.size(0), true);
}

void Sequences::append(const at::Tensor& logits) {
  const int64_t batch = tokens_.size(0);
  const bool has_layout = logits.dim() == 2 || (logits.dim() == 3 && logits.size(1) > 0);
  TORCH_CHECK_VALUE(has_layout && logits.size(0) == batch && logits.size(-1) > 0 && logits.is_cpu(),
                    "Sequences: logits must be (", batch, ", T, V) or (", batch,
                    ", V) on the CPU, got ", logits.sizes(), " on ", logits.device());
  const std::vector<int64_t> chosen = next_tokens(logits, tokens_, length_, ends_, sampling_);
  if (length_ == tokens_.size(1)) tokens_ = with_room(tokens_, length_);
  auto to = tokens_.accessor<int64_t, 2>();
  for (const auto row : c10::irange(batch)) {
    const int64_t token = is_unfinished_[row] ? chosen[row] : padding_;
    to[row][length_] = token;
    if (std::find(ends_.begin(), ends_.end(), token) != ends_.end()) is_unfinished_[row] = false;
  }
  ++length_;
}

void Sequences::show(at::Tensor& view) const {
  set_view(view, tokens_, {tokens_.size(0), length_}, tokens_.strides(), 0);
}

bool Sequences::goes_on() const {
  return std::find(is_unfinished_.begin(), is_unfinished_.end(), true) != is_unfinished_.end();
}

void run_loop(const Program& program, const Loop& loop, int64_t position,
              std::vector<at::Tensor> inputs, Sequences& sequences, int64_t most,
              const std::function<void()>& between_tokens, Progress& progress) {
  const Program::Series series(program);
  while (progress.count < most && sequences.goes_on()) {
    if (progress.count > 0) between_tokens();
    if (loop.tokens.has_value()) sequences.show(inputs.at(*loop.tokens));
    auto outputs = series.run(position + progress.count, inputs);
    if (!outputs.has_value()) return;
    progress.outputs = std::move(*outputs);
    ++progress.count;
    for (const auto& [input, output] : loop.feeds) inputs.at(input) = progress.outputs.at(output);
    sequences.append(progress.outputs.at(loop.logits));
  }
}

}  // namespace foo::graphs
