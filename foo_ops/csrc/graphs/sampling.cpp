#include "graphs/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <vector>

namespace foo::graphs {
namespace {

struct Candidate {
  int64_t token;
  float score;
};
using Candidates = std::vector<Candidate>;

void penalize(float* scores, int64_t count, const at::Tensor& tokens, double penalty) {
  const auto factor = static_cast<float>(penalty);
  std::vector<bool> is_penalized(count);
  const auto of_row = tokens.accessor<int64_t, 1>();
  for (const auto i : c10::irange(of_row.size(0))) {
    const int64_t token = of_row[i];
    TORCH_CHECK_INDEX(token >= 0 && token < count, "append_tokens: tokens must be in [0, ", count,
                      "), got ", token);
    if (is_penalized[token]) continue;
    is_penalized[token] = true;
    float& score = scores[token];
    score = score < 0 ? score * factor : score / factor;
  }
}

// Returns the `top_k` largest scores, with those that are equal to the least of them; or all.
Candidates most_likely(const float* scores, int64_t count, int64_t top_k) {
  float least = -std::numeric_limits<float>::infinity();
  if (top_k > 0 && top_k < count) {
    std::vector<float> largest(top_k);
    std::partial_sort_copy(scores, scores + count, largest.begin(), largest.end(),
                           std::greater<float>());
    least = largest.back();
  }
  Candidates candidates;
  for (const auto token : c10::irange(count)) {
    if (scores[token] >= least) candidates.push_back({token, scores[token]});
  }
  return candidates;
}

// Returns the softmax's terms before they are divided by their sum.
std::vector<float> terms_of(const Candidates& candidates, float largest) {
  std::vector<float> terms;
  terms.reserve(candidates.size());
  for (const Candidate& each : candidates) terms.push_back(std::exp(each.score - largest));
  return terms;
}

double sum_of(const std::vector<float>& terms) {
  return std::accumulate(terms.begin(), terms.end(), 0.0);
}

// Removes the least likely tokens whose probabilities together are at most 1 - top_p.
void keep_top_p(Candidates& candidates, float largest, double top_p, int64_t least) {
  const auto is_less = [](const Candidate& one, const Candidate& other) {
    return one.score != other.score ? one.score < other.score : one.token < other.token;
  };
  const auto count = static_cast<int64_t>(candidates.size());
  const auto total = static_cast<float>(sum_of(terms_of(candidates, largest)));
  const auto bound = static_cast<float>(1 - top_p);
  // Sorts from the least likely on, in growing parts of the most likely ones: most of a vocabulary
  // is less likely than all that are kept.
  double below = 0;
  int64_t sorted = std::min<int64_t>(count, 256);
  for (;; sorted = std::min(count, 8 * sorted)) {
    const auto begin = candidates.begin() + (count - sorted);
    if (sorted < count) std::nth_element(candidates.begin(), begin, candidates.end(), is_less);
    below = 0;
    for (auto each = candidates.begin(); each != begin; ++each) {
      below += std::exp(each->score - largest) / total;
    }
    if (sorted == count || below < bound - 1e-3) break;
  }
  std::sort(candidates.end() - sorted, candidates.end(), is_less);
  int64_t first = count - sorted;
  for (; first < count - least; ++first) {
    below += std::exp(candidates[first].score - largest) / total;
    if (static_cast<float>(below) > bound) break;
  }
  candidates.erase(candidates.begin(), candidates.begin() + std::max<int64_t>(first, 0));
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& one, const Candidate& other) { return one.token < other.token; });
}

// Returns a uniform random number as torch's double precision distribution does.
double as_uniform(uint64_t random) {
  constexpr int kDigits = 53;
  return static_cast<double>(random & ((uint64_t{1} << kDigits) - 1)) / (uint64_t{1} << kDigits);
}

int64_t draw(const Candidates& candidates, float largest, const std::vector<uint64_t>& random) {
  const std::vector<float> terms = terms_of(candidates, largest);
  const auto total = static_cast<float>(sum_of(terms));
  int64_t drawn = candidates.front().token;
  float most = -1;
  for (const auto i : c10::irange(candidates.size())) {
    const int64_t token = candidates[i].token;
    const auto exponential = static_cast<float>(-std::log1p(-as_uniform(random[token])));
    const float ratio = terms[i] / total / exponential;
    if (ratio > most) {
      most = ratio;
      drawn = token;
    }
  }
  return drawn;
}

// Overwrites the scores, (B, V) contiguous float32.
at::Tensor sample(const at::Tensor& scores, const at::Tensor& tokens, const Sampling& sampling) {
  const int64_t rows = scores.size(0), count = scores.size(1);
  at::Tensor drawn = at::empty({rows}, tokens.options());
  // All scores are checked before a number is drawn.
  std::vector<Candidates> kept;
  std::vector<float> largest;
  for (const auto row : c10::irange(rows)) {
    float* const own = scores.mutable_data_ptr<float>() + row * count;
    if (sampling.repetition_penalty != 1) {
      penalize(own, count, tokens[row], sampling.repetition_penalty);
    }
    const auto temperature = static_cast<float>(sampling.temperature);
    bool is_nan = false;
    for (const auto i : c10::irange(count)) {
      own[i] /= temperature;
      is_nan |= std::isnan(own[i]);
    }
    largest.push_back(*std::max_element(own, own + count));
    TORCH_CHECK(!is_nan && std::isfinite(largest.back()),
                "probability tensor contains either `inf`, `nan` or element < 0");
    kept.push_back(most_likely(own, count, sampling.top_k));
    if (sampling.top_p < 1) keep_top_p(kept.back(), largest.back(), sampling.top_p, sampling.least);
  }
  auto* const generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  std::vector<uint64_t> random(count);
  for (const auto row : c10::irange(rows)) {
    for (uint64_t& each : random) each = generator->random64();
    drawn.mutable_data_ptr<int64_t>()[row] = draw(kept[row], largest[row], random);
  }
  return drawn;
}

}  // namespace

bool append_tokens(const at::Tensor& logits, const at::Tensor& tokens, int64_t length,
                   const at::Tensor& is_unfinished, const std::vector<int64_t>& ends,
                   int64_t padding, const std::optional<Sampling>& sampling) {
  TORCH_CHECK_VALUE(
      (logits.dim() == 2 || (logits.dim() == 3 && logits.size(1) > 0)) && logits.size(-1) > 0,
      "append_tokens: logits must have shape (B, T, V) or (B, V), got ", logits.sizes());
  TORCH_CHECK_VALUE(tokens.dim() == 2 && tokens.size(0) == logits.size(0) &&
                        tokens.scalar_type() == at::kLong && length >= 0 && length < tokens.size(1),
                    "append_tokens: tokens must be int64 (B, S) with S above length, got ",
                    tokens.scalar_type(), " ", tokens.sizes());
  TORCH_CHECK_VALUE(is_unfinished.dim() == 1 && is_unfinished.size(0) == logits.size(0) &&
                        is_unfinished.scalar_type() == at::kBool,
                    "append_tokens: is_unfinished must be bool (B,), got ",
                    is_unfinished.scalar_type(), " ", is_unfinished.sizes());
  TORCH_CHECK_VALUE(logits.is_cpu() && tokens.is_cpu() && is_unfinished.is_cpu(),
                    "append_tokens: all tensors must be on the CPU");
  const at::Tensor last = logits.dim() == 3 ? logits.select(1, -1) : logits;
  at::Tensor chosen;
  if (sampling.has_value()) {
    const auto scores = last.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
    chosen = sample(scores, tokens.narrow(1, 0, length), *sampling);
  } else {
    // Scores are compared in float32.
    chosen = at::argmax(last.scalar_type() == at::kDouble ? last.to(at::kFloat) : last, -1);
  }
  const auto from = chosen.accessor<int64_t, 1>();
  auto to = tokens.accessor<int64_t, 2>();
  auto goes_on = is_unfinished.accessor<bool, 1>();
  bool is_any_unfinished = false;
  for (const auto row : c10::irange(from.size(0))) {
    const int64_t token = goes_on[row] ? from[row] : padding;
    to[row][length] = token;
    if (std::find(ends.begin(), ends.end(), token) != ends.end()) goes_on[row] = false;
    is_any_unfinished |= goes_on[row];
  }
  return is_any_unfinished;
}

}  // namespace foo::graphs
