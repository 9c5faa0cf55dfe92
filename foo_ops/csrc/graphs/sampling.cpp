#include "graphs/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
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

// Returns the place of the largest number; of the first one if there are several, or of the first
// NaN. Of 32,000 numbers of bfloat16, torch's operators find it in 58 us, this in 6.
template <class Number>
int64_t place_of_largest(const Number* numbers, int64_t count) {
  constexpr int64_t kBlock = 1024;
  float largest = -std::numeric_limits<float>::infinity();
  int64_t best = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    float of_block = -std::numeric_limits<float>::infinity();
    int is_nan = 0;
#pragma omp simd reduction(max : of_block) reduction(| : is_nan)
    for (int64_t i = begin; i < end; ++i) {
      const auto number = static_cast<float>(numbers[i]);
      of_block = std::max(of_block, number);
      is_nan |= number != number;
    }
    if (is_nan != 0) {
      return std::find_if(numbers + begin, numbers + end,
                          [](Number it) { return std::isnan(static_cast<float>(it)); }) -
             numbers;
    }
    if (of_block > largest) {
      largest = of_block;
      best = begin;
    }
  }
  return std::find_if(numbers + best, numbers + count,
                      [&](Number it) { return static_cast<float>(it) == largest; }) -
         numbers;
}

// The same for the last row of each sequence, (B, T, V) or (B, V).
template <class Number>
std::vector<int64_t> places_of_largest(const at::Tensor& scores) {
  const auto* const first = scores.const_data_ptr<Number>() +
                            (scores.dim() == 3 ? (scores.size(1) - 1) * scores.stride(1) : 0);
  std::vector<int64_t> places;
  for (const auto row : c10::irange(scores.size(0))) {
    places.push_back(place_of_largest(first + row * scores.stride(0), scores.size(-1)));
  }
  return places;
}

std::vector<int64_t> likeliest(const at::Tensor& logits) {
  const at::Tensor scores = logits.stride(-1) == 1 ? logits : logits.contiguous();
  switch (scores.scalar_type()) {
    case at::kBFloat16:
      return places_of_largest<at::BFloat16>(scores);
    case at::kHalf:
      return places_of_largest<at::Half>(scores);
    default:
      return places_of_largest<float>(scores.to(at::kFloat));
  }
}

void penalize(float* scores, int64_t count, const int64_t* tokens, int64_t length, double penalty) {
  const auto factor = static_cast<float>(penalty);
  std::vector<bool> is_penalized(count);
  for (const auto i : c10::irange(length)) {
    const int64_t token = tokens[i];
    TORCH_CHECK_INDEX(token >= 0 && token < count, "Sequences: tokens must be in [0, ", count,
                      "), got ", token);
    if (is_penalized[token]) continue;
    is_penalized[token] = true;
    float& score = scores[token];
    score = score < 0 ? score * factor : score / factor;
  }
}

// Tokens that may be drawn, of those whose scores are no less than `least`. Of the ones with the
// score `edge`, `surplus` are to be removed.
struct Kept {
  Candidates candidates;
  float least;
  float edge = 0;
  int64_t surplus = 0;
};

// Returns the `top_k` largest scores, with those that are equal to the least of them; or all.
Kept most_likely(const float* scores, int64_t count, int64_t top_k) {
  Kept kept{{}, -std::numeric_limits<float>::infinity()};
  if (top_k > 0 && top_k < count) {
    std::vector<float> largest(top_k);
    std::partial_sort_copy(scores, scores + count, largest.begin(), largest.end(),
                           std::greater<float>());
    kept.least = largest.back();
  }
  for (const auto token : c10::irange(count)) {
    if (scores[token] >= kept.least) kept.candidates.push_back({token, scores[token], 0});
  }
  return kept;
}

// Computes the candidates' probabilities among those that are not surplus.
void set_probabilities(Kept& kept) {
  const auto count = static_cast<int64_t>(kept.candidates.size());
  const at::Tensor scores = at::empty({count}, at::kFloat);
  auto* const values = scores.mutable_data_ptr<float>();
  int64_t surplus = kept.surplus;
  for (const auto i : c10::irange(count)) {
    values[i] = kept.candidates[i].score;
    if (surplus > 0 && values[i] == kept.edge) {
      values[i] = -std::numeric_limits<float>::infinity();
      --surplus;
    }
  }
  const at::Tensor probabilities = scores.softmax(-1);
  float of_edge = 0;
  for (const auto i : c10::irange(count)) {
    Candidate& each = kept.candidates[i];
    each.probability = probabilities.const_data_ptr<float>()[i];
    if (each.score == kept.edge) of_edge = std::max(of_edge, each.probability);
  }
  if (kept.surplus == 0) return;
  for (Candidate& each : kept.candidates) {
    if (each.score == kept.edge) each.probability = of_edge;
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

// Removes the least likely candidates. Of equal ones, which it may not tell apart, some are
// surplus.
void remove_least_likely(Kept& kept, int64_t removed) {
  Candidates ordered = kept.candidates;
  std::nth_element(ordered.begin(), ordered.begin() + removed, ordered.end(), is_less_likely);
  kept.edge = ordered[removed].score;
  const auto lower =
      std::erase_if(kept.candidates, [&](const Candidate& each) { return each.score < kept.edge; });
  kept.surplus = removed - static_cast<int64_t>(lower);
}

// Removes candidates with less than a part of the largest probability; returns whether there are
// any.
bool remove_below(Kept& kept, float part) {
  float largest = 0;
  for (const Candidate& each : kept.candidates) largest = std::max(largest, each.probability);
  const auto is_below = [&](const Candidate& each) { return each.probability < part * largest; };
  return std::erase_if(kept.candidates, is_below) > 0;
}

// Removes those that come first where torch sorts all scores, as transformers does; it promises no
// order. Logits of bfloat16 are often equal.
void remove_surplus(Kept& kept, const float* scores, int64_t count) {
  const at::Tensor masked = at::empty({1, count}, at::kFloat);
  auto* const values = masked.mutable_data_ptr<float>();
  for (const auto token : c10::irange(count)) {
    values[token] =
        scores[token] >= kept.least ? scores[token] : -std::numeric_limits<float>::infinity();
  }
  const at::Tensor order = std::get<1>(at::sort(masked, -1, /*descending=*/false));
  std::vector<bool> is_removed(count);
  for (const auto* token = order.const_data_ptr<int64_t>(); kept.surplus > 0; ++token) {
    if (values[*token] != kept.edge) continue;
    is_removed[*token] = true;
    --kept.surplus;
  }
  std::erase_if(kept.candidates, [&](const Candidate& each) { return is_removed[each.token]; });
}

// Returns a uniform random number as torch's double precision distribution does.
double as_uniform(uint64_t random) {
  constexpr int kDigits = 53;
  return static_cast<double>(random & ((uint64_t{1} << kDigits) - 1)) / (uint64_t{1} << kDigits);
}

Candidate draw(const Candidates& candidates, const std::vector<uint64_t>& random) {
  Candidate drawn = candidates.front();
  float largest = -1;
  for (const Candidate& each : candidates) {
    const double uniform = as_uniform(random[each.token]);
    // An exponential number is larger than the uniform one that it is computed from.
    if (each.probability < largest * static_cast<float>(uniform)) continue;
    const auto exponential = static_cast<float>(-std::log1p(-uniform));
    const float ratio = each.probability / exponential;
    if (ratio > largest) {
      largest = ratio;
      drawn = each;
    }
  }
  return drawn;
}

// Overwrites the scores, (B, V) contiguous float32.
std::vector<int64_t> sample(const at::Tensor& scores, const Sampling& sampling) {
  const int64_t rows = scores.size(0), count = scores.size(1);
  std::vector<int64_t> drawn(rows);
  // All scores are checked before a number is drawn.
  std::vector<Kept> kept;
  for (const auto row : c10::irange(rows)) {
    float* const own = scores.mutable_data_ptr<float>() + row * count;
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
    Kept of_row = most_likely(own, count, sampling.top_k);
    set_probabilities(of_row);
    if (sampling.top_p < 1) {
      // transformers compares sums in float32.
      const int64_t removed =
          std::min(count_below(of_row.candidates, static_cast<float>(1 - sampling.top_p)),
                   static_cast<int64_t>(of_row.candidates.size()) - sampling.least);
      if (removed > 0) {
        remove_least_likely(of_row, removed);
        set_probabilities(of_row);
      }
    }
    if (sampling.min_p > 0 && remove_below(of_row, static_cast<float>(sampling.min_p))) {
      set_probabilities(of_row);
    }
    kept.push_back(std::move(of_row));
  }
  auto* const generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  std::vector<uint64_t> random(count);
  for (const auto row : c10::irange(rows)) {
    for (uint64_t& each : random) each = generator->random64();
    Candidate token = draw(kept[row].candidates, random);
    if (kept[row].surplus > 0 && token.score == kept[row].edge) {
      remove_surplus(kept[row], scores.const_data_ptr<float>() + row * count, count);
      token = draw(kept[row].candidates, random);
    }
    drawn[row] = token.token;
  }
  return drawn;
}

}  // namespace

std::vector<int64_t> next_tokens(const at::Tensor& logits, const at::Tensor& tokens, int64_t length,
                                 const std::vector<int64_t>& ends, const Sampling& sampling) {
  const bool may_end = length >= sampling.least_length;
  if (sampling.is_greedy && sampling.repetition_penalty == 1) {
    std::vector<int64_t> tokens_found = likeliest(logits);
    const bool has_end = std::find_first_of(tokens_found.begin(), tokens_found.end(), ends.begin(),
                                            ends.end()) != tokens_found.end();
    if (may_end || !has_end) return tokens_found;
  }
  const at::Tensor last = logits.dim() == 3 ? logits.select(1, -1) : logits;
  const int64_t rows = last.size(0), count = last.size(1);
  const auto scores = last.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  for (const auto row : c10::irange(rows)) {
    float* const own = scores.mutable_data_ptr<float>() + row * count;
    if (sampling.repetition_penalty != 1) {
      const int64_t* const of_row = tokens.const_data_ptr<int64_t>() + row * tokens.stride(0);
      penalize(own, count, of_row, length, sampling.repetition_penalty);
    }
    if (may_end) continue;
    for (const int64_t end : ends) {
      if (end >= 0 && end < count) own[end] = -std::numeric_limits<float>::infinity();
    }
  }
  return sampling.is_greedy ? likeliest(scores) : sample(scores, sampling);
}

}  // namespace foo::graphs
