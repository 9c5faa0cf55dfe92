#include "ops/attention/plan.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "launch/jobs.h"
#include "ops/attention/programs.h"

namespace foo {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// A finite number in the bias that is at most this hides the key if the query sees another one:
// beside that one the weight is 0 in every dtype. Libraries write finfo.min.
constexpr double kLowestSeen = -1e30;

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

// A query whose keys are all hidden by finite numbers sees all of these keys with equal weight.
template <class Element>
bool shares_weight(const Element* row, int64_t stride, int64_t count) {
  if constexpr (!std::is_same_v<Element, bool>) {
    for (int64_t key = 0; key < count; ++key) {
      if (static_cast<double>(row[key * stride]) > -kInfinity) return true;
    }
  }
  return false;
}

// Calls call(pointer) with a pointer of the bias's element type.
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
  // A window may hide the keys that the bias shows. The others of the row then share the weight if
  // they are hidden by finite numbers.
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
    const auto count = static_cast<int64_t>(rows_.size());
    // Elements take half as long as multiplications.
    share_steps(count, static_cast<double>(keys) / 2, [&](int64_t begin, int64_t end) {
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
  // Products of the backward pass end with the keys if they all begin at a multiple of
  // kRowMultiple.
  piece.key_start = std::max(piece.key_start, first / kRowMultiple * kRowMultiple);
  piece.key_stop = std::max(piece.key_start, std::min(piece.key_stop, stop));
}

namespace {

// Keys are split if there are fewer blocks than kEnoughPieces, into about as many pieces in all, of
// at least kSplitLength keys. With much work there are more and shorter pieces. The numbers do not
// depend on the threads, so neither do the sums.
constexpr int64_t kEnoughPieces = 64, kSplitLength = 1024;
constexpr int64_t kPiecesOfMuchWork = 128, kSplitLengthOfMuchWork = 512;
// Pairs of a query and a key: more than 256 tiles of 128 queries and as many keys are much work.
constexpr int64_t kLittleWork = int64_t{256} * 128 * 128;
// Merged blocks per thread that remain.
constexpr int64_t kBlocksOfThread = 4;
// Most elements of query and output in a merged block: a megabyte of float32, for caches of one or
// two.
constexpr int64_t kBlockElements = int64_t{1} << 18;
// Block for processors with 16 registers if there are many blocks: whole panels of 3 vectors of 8.
constexpr int64_t kLargeBlock = 144;
static_assert(kLargeBlock <= kTileStride);

// Blocks are whole panels of the matrix product: 3 vectors of 8 wide with 16 registers, 4 vectors
// of 16 with 32. Kernels for another processor than this one give the same results, slower.
bool has_16_registers() {
#if defined(__x86_64__)
  static const bool has = !__builtin_cpu_supports("avx512f");
  return has;
#else
  return false;
#endif
}

int64_t usual_block() {
  return has_16_registers() ? 96 : 128;
}

// Number of heads with a common key head in a block of up to ``most`` queries.
int64_t heads_of_block(const Parameters& parameters, const Sequence& sequence, int64_t most) {
  // Programs process one head at a time.
  if (parameters.programs != nullptr) return 1;
  return std::clamp<int64_t>(most / sequence.query_length, 1, parameters.group);
}

int64_t count_blocks(const Parameters& parameters, const std::vector<Sequence>& sequences,
                     int64_t most) {
  int64_t count = 0;
  for (const Sequence& sequence : sequences) {
    if (sequence.query_length > 0 && parameters.group > 0) {
      const int64_t heads = heads_of_block(parameters, sequence, most);
      count += parameters.key_heads * ceil_divide(parameters.group, heads) *
               ceil_divide(sequence.query_length, most);
    }
  }
  return count;
}

// Returns the most queries in a block of the forward kernel, before merge_neighbours.
int64_t forward_block(const Parameters& parameters, const std::vector<Sequence>& sequences) {
  if (has_16_registers() && count_blocks(parameters, sequences, kLargeBlock) >= kEnoughPieces) {
    return kLargeBlock;
  }
  return usual_block();
}

void set_visible(Piece& piece, const Sequence& sequence, const AttentionOptions& options) {
  const int64_t aligned = sequence.key_length - sequence.query_length;
  const int64_t offset = options.part_offset ? options.part_offset->expect_int() : aligned;
  const int64_t left = options.window_left.expect_int(), right = options.window_right.expect_int();
  piece.alignment = std::clamp(offset, -kFar, kFar);
  piece.first_visible = -kFar;
  piece.last_visible = kFar;
  if (left >= 0) piece.first_visible = piece.alignment - std::min(left, kFar);
  if (right >= 0) piece.last_visible = piece.alignment + std::min(right, kFar);
  if (options.is_causal) {
    piece.last_visible = std::min<int64_t>(piece.last_visible, 0);
  }
}

// Skips the first and last keys that the block mask hides from all queries of a piece, which belong
// to one of its rows. The kernel skips other hidden keys.
void leave_hidden_keys_out(Piece& piece, const Parameters& parameters) {
  const int64_t row = piece.batch * parameters.mask_batch_stride +
                      piece.head * parameters.mask_head_stride +
                      piece.query_start / parameters.mask_query_block;
  const uint8_t* const states = parameters.window_states + row * parameters.windows;
  int64_t first = 0, stop = parameters.windows;
  while (stop > 0 && states[stop - 1] == kHidden) --stop;
  while (first < stop && states[first] == kHidden) ++first;
  piece.key_start = first * kKeyBlock;
  piece.key_stop = std::max(piece.key_start, std::min(piece.key_stop, stop * kKeyBlock));
}

void set_keys(Piece& piece, const Parameters& parameters, const Sequence& sequence,
              const std::optional<MaskBounds>& bounds) {
  const int64_t last_query = piece.query_start + piece.query_count - 1;
  const int64_t first = std::max<int64_t>(0, piece.query_start + piece.first_visible);
  const int64_t stop = std::min(sequence.key_length, last_query + piece.last_visible + 1);
  // A causal mask aligned to the upper left may hide all keys of a window aligned to the lower
  // right.
  const bool sees_any = stop > first && piece.first_visible <= piece.last_visible;
  piece.key_start = first / kKeyMultiple * kKeyMultiple;
  piece.key_stop = sees_any ? stop : piece.key_start;
  if (parameters.programs != nullptr) {
    leave_hidden_keys_out(piece, parameters);
  }
  if (bounds.has_value()) bounds->narrow(piece);
}

// Queries per row of the block mask; without a mask, all of them.
int64_t length_of_row(const Parameters& parameters, const Sequence& sequence) {
  return parameters.programs == nullptr ? sequence.query_length : parameters.mask_query_block;
}

void add_blocks(std::vector<Piece>& blocks, const Parameters& parameters, const Sequence& sequence,
                const AttentionOptions& options, const std::optional<MaskBounds>& bounds,
                int64_t most) {
  const int64_t length = sequence.query_length;
  if (length == 0 || parameters.group == 0) {
    return;
  }
  const int64_t heads = heads_of_block(parameters, sequence, most);
  const int64_t row = std::min(length, length_of_row(parameters, sequence));
  const int64_t count = ceil_divide(row, most);
  const int64_t rows = count == 1 ? row : ceil_divide(ceil_divide(row, count), 8) * 8;
  Piece piece{};
  piece.batch = sequence.batch;
  piece.query_offset = sequence.query_offset;
  piece.key_offset = sequence.key_offset;
  piece.slot = -1;
  piece.key_splits = 1;
  piece.statistics = -1;
  set_visible(piece, sequence, options);
  for (int64_t key_head = 0; key_head < parameters.key_heads; ++key_head) {
    for (int64_t index = 0; index < parameters.group; index += heads) {
      piece.head = key_head * parameters.group + index;
      piece.heads = std::min(heads, parameters.group - index);
      piece.block = 0;
      for (int64_t start = 0; start < length;) {
        const int64_t stop = std::min(length, (start / row + 1) * row);
        piece.query_start = start;
        piece.query_count = std::min(rows, stop - start);
        set_keys(piece, parameters, sequence, bounds);
        blocks.push_back(piece);
        start += piece.query_count;
        ++piece.block;
      }
    }
  }
}

std::vector<Piece> cut_into_blocks_of(const Parameters& parameters,
                                      const std::vector<Sequence>& sequences,
                                      const AttentionOptions& options,
                                      const std::optional<MaskBounds>& bounds, int64_t most) {
  std::vector<Piece> blocks;
  for (const Sequence& sequence : sequences) {
    add_blocks(blocks, parameters, sequence, options, bounds, most);
  }
  return blocks;
}

// Whether merging two blocks gives equal results, to the last bit: their panels and their tiles of
// keys are the same, neither is for the few-queries kernel, and the second begins with a panel.
// Their key splits have room in slots of ``slot_rows``, and the first block fills its own.
bool can_merge(const Parameters& parameters, const Piece& first, const Piece& second, int64_t most,
               int64_t slot_rows) {
  const bool are_neighbours = first.batch == second.batch && first.head == second.head &&
                              first.query_offset == second.query_offset &&
                              second.query_start == first.query_start + first.query_count;
  const bool have_whole_panels = first.heads == 1 && first.query_count % kWidestPanel == 0 &&
                                 first.query_count + second.query_count <= most &&
                                 second.query_count > kFewQueries;
  // The second may continue where the first ended only if no other key split follows.
  const bool goes_on = first.key_split + 1 == first.key_splits &&
                       first.key_stop < second.key_stop &&
                       (first.key_stop - first.key_start) % kKeyBlock == 0;
  const bool are_whole = first.slot < 0 && second.slot < 0;
  // Tiles that the block mask hides from one of them are still skipped for that one.
  const bool begins_before =
      parameters.programs != nullptr && are_whole && first.key_start < second.key_start;
  const bool have_same_tiles = (first.key_start == second.key_start || begins_before) &&
                               (first.key_stop == second.key_stop || goes_on);
  const bool have_adjacent_slots = first.slot >= 0 && second.slot >= 0 &&
                                   first.key_split == second.key_split &&
                                   first.query_count == (second.slot - first.slot) * slot_rows;
  return are_neighbours && have_whole_panels && have_same_tiles &&
         (are_whole || have_adjacent_slots);
}

std::vector<Piece> merge_pairs(const Parameters& parameters, const std::vector<Piece>& pieces,
                               int64_t most, double most_work, int64_t slot_rows) {
  std::vector<Piece> merged;
  bool is_single = false;
  for (const Piece& piece : pieces) {
    is_single = is_single && can_merge(parameters, merged.back(), piece, most, slot_rows) &&
                static_cast<double>(work_of(merged.back()) + work_of(piece)) <= most_work;
    if (is_single) {
      merged.back().query_count += piece.query_count;
      merged.back().key_stop = piece.key_stop;
      merged.back().key_splits = piece.key_splits;
      is_single = false;
    } else {
      merged.push_back(piece);
      is_single = true;
    }
  }
  return merged;
}

// Each block packs its keys and values, so fewer blocks are faster as long as there are enough for
// the threads. One block of 1024 queries takes 0.86 of the time of 4 of 256.
std::vector<Piece> merge_neighbours(const Parameters& parameters, std::vector<Piece> pieces,
                                    int64_t slot_rows) {
  const int64_t dims = std::max<int64_t>(1, parameters.head_dim + parameters.value_dim);
  const int64_t most = std::min(kQueryBlock, kBlockElements / dims);
  const int64_t threads = at::get_num_threads();
  const auto enough = static_cast<size_t>(threads == 1 ? 1 : kBlocksOfThread * threads);
  // All other threads may wait for the one that runs the largest block last. Two threads take 1.05
  // times as long for a head of 2,048 if no block has more than a sixth of the work.
  const auto parts = static_cast<double>(std::max<int64_t>(1, 6 * threads - 9));
  double work = 0;
  for (const Piece& piece : pieces) work += static_cast<double>(work_of(piece));
  while (true) {
    std::vector<Piece> merged = merge_pairs(parameters, pieces, most, work / parts, slot_rows);
    if (merged.size() == pieces.size() || merged.size() < enough) {
      return pieces;
    }
    pieces = std::move(merged);
  }
}

std::vector<Piece> take_if(std::vector<Piece>& pieces, bool (*condition)(const Piece&)) {
  // Partitions need memory, and mostly all or none of the pieces are taken.
  if (std::none_of(pieces.begin(), pieces.end(), condition)) return {};
  if (std::all_of(pieces.begin(), pieces.end(), condition)) return std::exchange(pieces, {});
  std::vector<Piece> taken;
  const auto rest = std::stable_partition(pieces.begin(), pieces.end(),
                                          [&](const Piece& piece) { return !condition(piece); });
  taken.assign(rest, pieces.end());
  pieces.erase(rest, pieces.end());
  return taken;
}

}  // namespace

const Piece& largest_of(const std::vector<Piece>& pieces) {
  return *std::max_element(pieces.begin(), pieces.end(),
                           [](const Piece& a, const Piece& b) { return rows_of(a) < rows_of(b); });
}

std::vector<Piece> cut_into_blocks(const Parameters& parameters,
                                   const std::vector<Sequence>& sequences,
                                   const AttentionOptions& options,
                                   const std::optional<MaskBounds>& bounds) {
  return cut_into_blocks_of(parameters, sequences, options, bounds, usual_block());
}

bool have_much_work(const std::vector<Piece>& blocks) {
  int64_t work = 0;
  for (const Piece& block : blocks) work += work_of(block);
  return work > kLittleWork;
}

std::vector<Piece> split_keys(std::vector<Piece>& blocks,
                              const std::function<int64_t(int64_t keys)>& length_of) {
  std::vector<int64_t> lengths;
  int64_t slots = 0, most_splits = 1;
  for (Piece& block : blocks) {
    const int64_t keys = block.key_stop - block.key_start;
    const int64_t length = length_of(keys);
    lengths.push_back(length);
    block.key_splits = std::max<int64_t>(1, ceil_divide(keys, length));
    block.slot = block.key_splits > 1 ? slots++ : -1;
    most_splits = std::max(most_splits, block.key_splits);
  }
  std::vector<Piece> pieces;
  for (int64_t split = 0; split < most_splits; ++split) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (split < blocks[i].key_splits) {
        Piece piece = blocks[i];
        piece.key_split = split;
        piece.key_start += split * lengths[i];
        piece.key_stop = std::min(piece.key_stop, piece.key_start + lengths[i]);
        pieces.push_back(piece);
      }
    }
  }
  return pieces;
}

ForwardPlan plan_forward(const Parameters& parameters, const std::vector<Sequence>& sequences,
                         const AttentionOptions& options, const std::optional<MaskBounds>& bounds) {
  ForwardPlan plan;
  // Only the few-queries kernel reads an int8 cache.
  const int64_t most =
      parameters.has_int8_cache ? kFewQueries : forward_block(parameters, sequences);
  std::vector<Piece> blocks = cut_into_blocks_of(parameters, sequences, options, bounds, most);
  if (blocks.empty()) {
    return plan;
  }
  const auto count = static_cast<int64_t>(blocks.size());
  const bool is_fine = have_much_work(blocks) && rows_of(largest_of(blocks)) > kFewQueries;
  const int64_t all = is_fine ? kPiecesOfMuchWork : kEnoughPieces;
  const int64_t splits = count < kEnoughPieces ? ceil_divide(all, count) : 1;
  const int64_t least = is_fine ? kSplitLengthOfMuchWork : kSplitLength;
  plan.pieces =
      split_keys(blocks, [&](int64_t keys) { return std::max(least, part_of_keys(keys, splits)); });
  plan.split_blocks = take_if(blocks, [](const Piece& piece) { return piece.key_splits > 1; });
  for (const Piece& block : plan.split_blocks) {
    plan.key_splits = std::max(plan.key_splits, block.key_splits);
    plan.rows = std::max(plan.rows, rows_of(block));
  }
  if (!parameters.modifies && !has_16_registers()) {
    plan.pieces = merge_neighbours(parameters, std::move(plan.pieces), plan.rows);
  }
  // The few-queries kernel has no score tiles, which programs need.
  if (parameters.programs == nullptr) {
    plan.few_queries =
        take_if(plan.pieces, [](const Piece& piece) { return rows_of(piece) <= kFewQueries; });
  }
  return plan;
}

std::vector<std::vector<Piece>> shares_of(const std::vector<Piece>& pieces) {
  const int64_t threads = at::get_num_threads(), count = static_cast<int64_t>(pieces.size());
  std::vector<std::vector<Piece>> shares;
  for (int64_t thread = 0; thread < threads; ++thread) {
    auto& share =
        shares.emplace_back(pieces.begin() + ThreadShares::begin(thread, count, threads),
                            pieces.begin() + ThreadShares::begin(thread + 1, count, threads));
    const auto has_more_work = [](const Piece& a, const Piece& b) {
      return work_of(a) > work_of(b);
    };
    // Sorting needs memory.
    if (!std::is_sorted(share.begin(), share.end(), has_more_work)) {
      std::stable_sort(share.begin(), share.end(), has_more_work);
    }
  }
  return shares;
}

}  // namespace foo
