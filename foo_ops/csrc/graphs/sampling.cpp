#include "graphs/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <mutex>
#include <tuple>
#include <vector>

namespace foo::graphs {
namespace {

struct Candidate {
  int64_t token;
  float score;
  float probability;
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
    if (scores[token] >= least) candidates.push_back({token, scores[token], 0});
  }
  return candidates;
}

// Computes the candidates' probabilities among themselves.
void set_probabilities(Candidates& candidates) {
  const auto count = static_cast<int64_t>(candidates.size());
  const at::Tensor scores = at::empty({count}, at::kFloat);
  auto* const values = scores.mutable_data_ptr<float>();
  for (const auto i : c10::irange(count)) values[i] = candidates[i].score;
  const at::Tensor probabilities = scores.softmax(-1);
  for (const auto i : c10::irange(count)) {
    candidates[i].probability = probabilities.const_data_ptr<float>()[i];
  }
}

bool is_less_likely(const Candidate& one, const Candidate& other) {
  return one.score < other.score;
}

// Returns how many of the least likely candidates have at most a probability together.
//
// They are not sorted, but counted in ranges of scores; only those of the range in which the sum
// reaches the bound are sorted.
int64_t count_below(const Candidates& candidates, float bound) {
  constexpr int kRanges = 1024;
  constexpr float kWidth = 32;  // what is so far below the largest score is as good as impossible
  const float most = std::max_element(candidates.begin(), candidates.end(), is_less_likely)->score;
  const auto range_of = [&](const Candidate& each) {
    const float place = (each.score - most + kWidth) * (kRanges / kWidth);
    return static_cast<int>(std::clamp(place, 0.0F, kRanges - 1.0F));
  };
  std::array<double, kRanges> sums{};
  std::array<int64_t, kRanges> counts{};
  for (const Candidate& each : candidates) {
    sums[range_of(each)] += each.probability;
    ++counts[range_of(each)];
  }
  double sum = 0;
  int64_t count = 0;
  int reached = 0;
  for (; reached < kRanges && static_cast<float>(sum + sums[reached]) <= bound; ++reached) {
    sum += sums[reached];
    count += counts[reached];
  }
  Candidates undecided;
  std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(undecided),
               [&](const Candidate& each) { return range_of(each) == reached; });
  std::sort(undecided.begin(), undecided.end(), is_less_likely);
  for (const Candidate& each : undecided) {
    sum += each.probability;
    if (static_cast<float>(sum) > bound) break;
    ++count;
  }
  return count;
}

// Removes some of the least likely candidates, of `vocabulary` tokens.
//
// Of equal ones those are removed that come first where torch sorts all scores, as transformers
// does; it promises no order. Logits of bfloat16 are often equal.
void remove_least_likely(Candidates& candidates, int64_t removed, int64_t vocabulary) {
  Candidates ordered = candidates;
  std::nth_element(ordered.begin(), ordered.begin() + removed, ordered.end(), is_less_likely);
  const float edge = ordered[removed].score;
  const auto is_lower = [&](const Candidate& each) { return each.score < edge; };
  int64_t equal = removed - std::count_if(candidates.begin(), candidates.end(), is_lower);
  std::vector<bool> is_removed;
  if (equal > 0) {
    is_removed.resize(vocabulary);
    const at::Tensor scores = at::full({1, vocabulary}, -std::numeric_limits<float>::infinity(),
                                       at::TensorOptions(at::kFloat));
    for (const Candidate& each : candidates) {
      scores.mutable_data_ptr<float>()[each.token] = each.score;
    }
    const at::Tensor order = std::get<1>(at::sort(scores, -1, /*descending=*/false));
    const auto* token = order.const_data_ptr<int64_t>();
    for (; equal > 0; ++token) {
      if (scores.const_data_ptr<float>()[*token] != edge) continue;
      is_removed[*token] = true;
      --equal;
    }
  }
  std::erase_if(candidates, [&](const Candidate& each) {
    return is_lower(each) || (!is_removed.empty() && is_removed[each.token]);
  });
}

// Returns a uniform random number as torch's double precision distribution does.
double as_uniform(uint64_t random) {
  constexpr int kDigits = 53;
  return static_cast<double>(random & ((uint64_t{1} << kDigits) - 1)) / (uint64_t{1} << kDigits);
}

int64_t draw(const Candidates& candidates, const std::vector<uint64_t>& random) {
  int64_t drawn = candidates.front().token;
  float largest = -1;
  for (const Candidate& each : candidates) {
    const double uniform = as_uniform(random[each.token]);
    // An exponential number is larger than the uniform one that it is computed from.
    if (each.probability < largest * static_cast<float>(uniform)) continue;
    const auto exponential = static_cast<float>(-std::log1p(-uniform));
    const float ratio = each.probability / exponential;
    if (ratio > largest) {
      largest = ratio;
      drawn = each.token;
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
  for (const auto row : c10::irange(rows)) {
    float* const own = scores.mutable_data_ptr<float>() + row * count;
    if (sampling.repetition_penalty != 1) {
      penalize(own, count, tokens[row], sampling.repetition_penalty);
    }
    const auto temperature = static_cast<float>(sampling.temperature);
    bool is_nan = false;
    float largest = -std::numeric_limits<float>::infinity();
    for (const auto i : c10::irange(count)) {
      own[i] /= temperature;
      is_nan |= std::isnan(own[i]);
      largest = std::max(largest, own[i]);
    }
    TORCH_CHECK(!is_nan && std::isfinite(largest),
                "probability tensor contains either `inf`, `nan` or element < 0");
    Candidates candidates = most_likely(own, count, sampling.top_k);
    set_probabilities(candidates);
    if (sampling.top_p < 1) {
      // transformers compares sums in float32.
      const int64_t removed =
          std::min(count_below(candidates, static_cast<float>(1 - sampling.top_p)),
                   static_cast<int64_t>(candidates.size()) - sampling.least);
      if (removed > 0) {
        remove_least_likely(candidates, removed, count);
        set_probabilities(candidates);
      }
    }
    kept.push_back(std::move(candidates));
  }
  auto* const generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  std::vector<uint64_t> random(count);
  for (const auto row : c10::irange(rows)) {
    for (uint64_t& each : random) each = generator->random64();
    drawn.mutable_data_ptr<int64_t>()[row] = draw(kept[row], random);
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
    // torch's own argmax of 32,000 bfloat16 takes 117 us, and 35 as float32.
    chosen = at::argmax(last.to(at::kFloat), -1);
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
