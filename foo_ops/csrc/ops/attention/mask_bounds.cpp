#include "ops/attention/mask_bounds.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <limits>
#include <type_traits>

namespace foo {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// A finite number that is added to the scores hides a key from here on, if the query sees another
// one: beside it the weight is 0 in every dtype. Libraries write finfo.min.
constexpr double kLowestSeen = -1e30;
constexpr int64_t kElementsOfThread = 1 << 16;

bool is_seen(bool element, double) {
  return element;
}

template <class Number>
bool is_seen(Number element, double hidden) {
  return !(static_cast<double>(element) <= hidden);
}

template <class Bounds, class Element>
Bounds bounds_of_row(const Element* row, int64_t stride, int64_t count, double hidden) {
  int64_t first = 0, stop = count;
  while (first < stop && !is_seen(row[first * stride], hidden)) ++first;
  while (stop > first && !is_seen(row[(stop - 1) * stride], hidden)) --stop;
  return {first, stop};
}

// Queries whose keys are all hidden by finite numbers see all of them alike.
template <class Element>
bool shares_weight(const Element* row, int64_t stride, int64_t count) {
  if constexpr (!std::is_same_v<Element, bool>) {
    for (int64_t key = 0; key < count; ++key) {
      if (static_cast<double>(row[key * stride]) > -kInfinity) return true;
    }
  }
  return false;
}

// Calls call(pointer) with the bias as what its elements are.
template <class Call>
void with_elements(const Parameters& parameters, at::ScalarType query_type, Call call) {
  const void* const data = parameters.attn_bias.data;
  if (parameters.bias_kind == kBool) return call(static_cast<const bool*>(data));
  const auto type = parameters.bias_kind == kFloat32 ? at::kFloat : query_type;
  if (type == at::kDouble) return call(static_cast<const double*>(data));
  if (type == at::kBFloat16) return call(static_cast<const c10::BFloat16*>(data));
  if (type == at::kHalf) return call(static_cast<const c10::Half*>(data));
  return call(static_cast<const float*>(data));
}

}  // namespace

MaskBounds::MaskBounds(const Parameters& parameters, at::ScalarType query_type,
                       const AttentionOptions& options) {
  // A key that the bias shows may be hidden by a window: all others of the row then share the
  // weight if they are hidden by finite numbers.
  const bool has_window =
      options.is_causal || options.window_left >= 0 || options.window_right >= 0;
  const double hidden = has_window ? -kInfinity : kLowestSeen;
  const auto& strides = parameters.attn_bias.strides;
  const auto size = [&](int axis, int64_t count) {
    return strides[axis] == 0 ? std::min<int64_t>(1, count) : count;
  };
  const int64_t batch = size(0, parameters.batch), heads = size(1, parameters.query_heads);
  const int64_t rows = size(2, parameters.query_length), keys = parameters.key_length;
  row_step_ = rows <= 1 ? 0 : 1;
  head_step_ = heads <= 1 ? 0 : rows;
  batch_step_ = batch <= 1 ? 0 : rows * heads;
  rows_.resize(batch * heads * rows);
  with_elements(parameters, query_type, [&](const auto* elements) {
    const int64_t grain = std::max<int64_t>(1, kElementsOfThread / std::max<int64_t>(1, keys));
    at::parallel_for(0, static_cast<int64_t>(rows_.size()), grain, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const auto* const row = elements + index / (heads * rows) * strides[0] +
                                index / rows % heads * strides[1] + index % rows * strides[2];
        const bool is_broadcast = strides[3] == 0 && keys > 0;
        Bounds& bounds = rows_[index];
        bounds = bounds_of_row<Bounds>(row, strides[3], is_broadcast ? 1 : keys, hidden);
        const bool sees_any = bounds.first < bounds.stop;
        if ((is_broadcast && sees_any) ||
            (!sees_any && shares_weight(row, strides[3], is_broadcast ? 1 : keys))) {
          bounds = {0, keys};
        }
      }
    });
  });
}

std::optional<MaskBounds> MaskBounds::of(const Parameters& parameters, at::ScalarType query_type,
                                         const AttentionOptions& options) {
  if (parameters.bias_kind == kNone) return std::nullopt;
  return MaskBounds(parameters, query_type, options);
}

void MaskBounds::narrow(Piece& piece) const {
  int64_t first = piece.key_stop, stop = piece.key_start;
  const int64_t heads = head_step_ == 0 ? 1 : piece.heads;
  const int64_t queries = row_step_ == 0 ? 1 : piece.query_count;
  const auto* const begin = rows_.data() + piece.batch * batch_step_ + piece.head * head_step_ +
                            piece.query_start * row_step_;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t query = 0; query < queries; ++query) {
      const Bounds& bounds = begin[head * head_step_ + query * row_step_];
      if (bounds.first < bounds.stop) {
        first = std::min(first, bounds.first);
        stop = std::max(stop, bounds.stop);
      }
    }
  }
  // Products of the backward pass end with the keys if all begin with whole ones.
  piece.key_start = std::max(piece.key_start, first / kRowMultiple * kRowMultiple);
  piece.key_stop = std::max(piece.key_start, std::min(piece.key_stop, stop));
}

}  // namespace foo
