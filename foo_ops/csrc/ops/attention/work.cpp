#include "ops/attention/work.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "launch/kernel_table.h"

namespace foo {

namespace {

// Keys are split where there are fewer blocks. This does not depend on the threads, so that neither
// do the sums.
constexpr int64_t kEnoughPieces = 64;
constexpr int64_t kPartLength = 1024;
// Of merged blocks each of several threads has to have so many, so that none has long to wait for
// another.
constexpr int64_t kBlocksOfThread = 4;
// The most elements of query and output in a merged block: a megabyte of float32, of caches that
// have one or two.
constexpr int64_t kBlockElements = int64_t{1} << 18;
// From here on a rounding of the logsumexp changes weights by more than 2^-16. Beside a mask of
// -1e9 nothing is left of the logarithm of how many keys share it.
constexpr double kLargeLogsumexp = 256.0;
// A block of few registers, where there are many. It is whole panels of 3 vectors of 8.
constexpr int64_t kLargeBlock = 144;
static_assert(kLargeBlock <= kTileStride);

// Kernels live as long as the process: they are never destroyed.
Kernel& forward_kernel(const Parameters& parameters) {
  static auto* kernel = new Kernel("attention_forward");
  static auto* plain = new Kernel("attention_forward.plain");
  return is_plain(parameters) ? *plain : *kernel;
}

Kernel& decode_kernel(const Parameters& parameters) {
  static auto* kernel = new Kernel("attention_decode");
  static auto* plain = new Kernel("attention_decode.plain");
  return is_plain(parameters) ? *plain : *kernel;
}

Kernel& merge_kernel() {
  static auto* kernel = new Kernel("attention_merge");
  return *kernel;
}

// Whole panels of the matrix product, which are 3 vectors of 8 wide with 16 registers, and 4 of 16
// with 32. Kernels for another processor than this compute the same, slower.
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

// How many heads that share a key head are in a block of up to ``most`` queries.
int64_t heads_of_block(const Parameters& parameters, const Sequence& sequence, int64_t most) {
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

// The most queries in a block of the forward kernel, but for what merge_neighbours makes of them.
int64_t forward_block(const Parameters& parameters, const std::vector<Sequence>& sequences) {
  if (has_16_registers() && count_blocks(parameters, sequences, kLargeBlock) >= kEnoughPieces) {
    return kLargeBlock;
  }
  return usual_block();
}

void set_visible(Piece& piece, const Sequence& sequence, const AttentionOptions& options) {
  piece.alignment = sequence.key_length - sequence.query_length;
  piece.first_visible = -kFar;
  piece.last_visible = kFar;
  if (options.window_left >= 0) {
    piece.first_visible = piece.alignment - std::min(options.window_left, kFar);
  }
  if (options.window_right >= 0) {
    piece.last_visible = piece.alignment + std::min(options.window_right, kFar);
  }
  if (options.is_causal) {
    piece.last_visible = std::min<int64_t>(piece.last_visible, 0);
  }
}

void set_keys(Piece& piece, const Sequence& sequence) {
  const int64_t last_query = piece.query_start + piece.query_count - 1;
  const int64_t first = std::max<int64_t>(0, piece.query_start + piece.first_visible);
  const int64_t stop = std::min(sequence.key_length, last_query + piece.last_visible + 1);
  // A causal mask, aligned to the upper left, may leave nothing of a window, aligned to the lower
  // right.
  const bool sees_any = stop > first && piece.first_visible <= piece.last_visible;
  piece.key_start = first / kKeyMultiple * kKeyMultiple;
  piece.key_stop = sees_any ? stop : piece.key_start;
}

void add_blocks(std::vector<Piece>& blocks, const Parameters& parameters, const Sequence& sequence,
                const AttentionOptions& options, int64_t most) {
  const int64_t length = sequence.query_length;
  if (length == 0 || parameters.group == 0) {
    return;
  }
  const int64_t heads = heads_of_block(parameters, sequence, most);
  const int64_t count = ceil_divide(length, most);
  const int64_t rows = count == 1 ? length : ceil_divide(ceil_divide(length, count), 8) * 8;
  Piece piece{};
  piece.batch = sequence.batch;
  piece.query_offset = sequence.query_offset;
  piece.key_offset = sequence.key_offset;
  piece.slot = -1;
  piece.parts = 1;
  piece.statistics = -1;
  set_visible(piece, sequence, options);
  for (int64_t key_head = 0; key_head < parameters.key_heads; ++key_head) {
    for (int64_t index = 0; index < parameters.group; index += heads) {
      piece.head = key_head * parameters.group + index;
      piece.heads = std::min(heads, parameters.group - index);
      for (int64_t start = 0; start < length; start += rows) {
        piece.query_start = start;
        piece.query_count = std::min(rows, length - start);
        piece.block = start / rows;
        set_keys(piece, sequence);
        blocks.push_back(piece);
      }
    }
  }
}

std::vector<Piece> cut_into_blocks_of(const Parameters& parameters,
                                      const std::vector<Sequence>& sequences,
                                      const AttentionOptions& options, int64_t most) {
  std::vector<Piece> blocks;
  for (const Sequence& sequence : sequences) {
    add_blocks(blocks, parameters, sequence, options, most);
  }
  return blocks;
}

// Splits the keys of each block into ``parts``, or fewer where there are few keys. Split blocks get
// a slot each. The same part of all blocks follow one another.
std::vector<Piece> split_keys(std::vector<Piece>& blocks, int64_t parts) {
  std::vector<int64_t> lengths;
  int64_t slots = 0, most_parts = 1;
  for (Piece& block : blocks) {
    const int64_t keys = block.key_stop - block.key_start;
    const int64_t length =
        std::max(kPartLength, ceil_divide(ceil_divide(keys, parts), kKeyBlock) * kKeyBlock);
    lengths.push_back(length);
    block.parts = std::max<int64_t>(1, ceil_divide(keys, length));
    block.slot = block.parts > 1 ? slots++ : -1;
    most_parts = std::max(most_parts, block.parts);
  }
  std::vector<Piece> pieces;
  for (int64_t part = 0; part < most_parts; ++part) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (part < blocks[i].parts) {
        Piece piece = blocks[i];
        piece.part = part;
        piece.key_start += part * lengths[i];
        piece.key_stop = std::min(piece.key_stop, piece.key_start + lengths[i]);
        pieces.push_back(piece);
      }
    }
  }
  return pieces;
}

// Whether two blocks as one give the same results, to the last bit: their panels and their tiles of
// keys are the same, and neither is one for the kernel for few queries. Parts of them have their
// place in slots of ``slot_rows``, of which the first then fills its own.
// They are merged where the second begins with a panel.
bool can_merge(const Piece& first, const Piece& second, int64_t most, int64_t slot_rows) {
  const bool are_neighbours = first.batch == second.batch && first.head == second.head &&
                              first.query_offset == second.query_offset &&
                              second.query_start == first.query_start + first.query_count;
  const bool have_whole_panels = first.heads == 1 && first.query_count % kWidestPanel == 0 &&
                                 first.query_count + second.query_count <= most &&
                                 second.query_count > kFewQueries;
  // Only where no other part follows may the second go on where the first has ended.
  const bool goes_on = first.part + 1 == first.parts && first.key_stop < second.key_stop &&
                       (first.key_stop - first.key_start) % kKeyBlock == 0;
  const bool have_same_tiles =
      first.key_start == second.key_start && (first.key_stop == second.key_stop || goes_on);
  const bool are_whole = first.slot < 0 && second.slot < 0;
  const bool have_adjacent_slots = first.slot >= 0 && second.slot >= 0 &&
                                   first.part == second.part &&
                                   first.query_count == (second.slot - first.slot) * slot_rows;
  return are_neighbours && have_whole_panels && have_same_tiles &&
         (are_whole || have_adjacent_slots);
}

std::vector<Piece> merge_pairs(const std::vector<Piece>& pieces, int64_t most, int64_t slot_rows) {
  std::vector<Piece> merged;
  bool is_single = false;
  for (const Piece& piece : pieces) {
    is_single = is_single && can_merge(merged.back(), piece, most, slot_rows);
    if (is_single) {
      merged.back().query_count += piece.query_count;
      merged.back().key_stop = piece.key_stop;
      merged.back().parts = piece.parts;
      is_single = false;
    } else {
      merged.push_back(piece);
      is_single = true;
    }
  }
  return merged;
}

// Keys and values are packed for each block, so that fewer of them are quicker, if there are enough
// for the threads. One block of 1024 queries takes 0.86 of the time of 4 of 256.
std::vector<Piece> merge_neighbours(const Parameters& parameters, std::vector<Piece> pieces,
                                    int64_t slot_rows) {
  const int64_t dims = std::max<int64_t>(1, parameters.head_dim + parameters.value_dim);
  const int64_t most = std::min(kQueryBlock, kBlockElements / dims);
  const int64_t threads = at::get_num_threads();
  const auto enough = static_cast<size_t>(threads == 1 ? 1 : kBlocksOfThread * threads);
  while (true) {
    std::vector<Piece> merged = merge_pairs(pieces, most, slot_rows);
    if (merged.size() == pieces.size() || merged.size() < enough) {
      return pieces;
    }
    pieces = std::move(merged);
  }
}

int64_t work_of(const Piece& piece) {
  return rows_of(piece) * (piece.key_stop - piece.key_start);
}

// The largest of each thread's share first, so that at the end none has long to wait for another.
void sort_by_work(std::vector<Piece>& pieces) {
  const int64_t threads = at::get_num_threads(), count = static_cast<int64_t>(pieces.size());
  const auto begin = [&](int64_t thread) {
    return pieces.begin() + ThreadShares::begin(thread, count, threads);
  };
  for (int64_t thread = 0; thread < threads; ++thread) {
    std::stable_sort(begin(thread), begin(thread + 1),
                     [](const Piece& a, const Piece& b) { return work_of(a) > work_of(b); });
  }
}

void run_pieces(const Parameters& parameters, AttentionFunction* kernel,
                std::vector<Piece> pieces) {
  if (!pieces.empty()) {
    sort_by_work(pieces);
    run_jobs(parameters, kernel, static_cast<int64_t>(pieces.size()), largest_of(pieces),
             [&](int64_t job, int64_t, const auto& call) { call(pieces[job]); });
  }
}

template <class Number>
bool has_large_logsumexp(const Parameters& parameters, const Piece& block) {
  const Operand& logsumexp = parameters.logsumexp;
  const auto* const first = static_cast<const Number*>(logsumexp.data) +
                            block.batch * logsumexp.strides[0] +
                            (block.query_offset + block.query_start) * logsumexp.strides[2];
  for (int64_t head = block.head; head < block.head + block.heads; ++head) {
    for (int64_t row = 0; row < block.query_count; ++row) {
      const auto value = first[head * logsumexp.strides[1] + row * logsumexp.strides[2]];
      if (std::isfinite(value) && std::abs(value) > kLargeLogsumexp) {
        return true;
      }
    }
  }
  return false;
}

std::vector<Piece> take_if(std::vector<Piece>& pieces, bool (*condition)(const Piece&)) {
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

void set_options(Parameters& parameters, Extras& extras, const at::Tensor& query,
                 const std::optional<at::Tensor>& alibi_slopes,
                 const std::optional<at::Tensor>& sinks, const AttentionOptions& options,
                 const std::optional<at::Tensor>& seed) {
  const auto type = compute_type(query);
  parameters.scale =
      options.scale.value_or(1.0 / std::sqrt(static_cast<double>(parameters.head_dim)));
  parameters.softcap = options.softcap;
  if (alibi_slopes.has_value()) {
    extras.alibi_slopes = alibi_slopes->to(type);
    parameters.has_alibi_slopes = true;
    parameters.alibi_slopes.data = extras.alibi_slopes.data_ptr();
    const bool has_batch = extras.alibi_slopes.dim() == 2;
    parameters.alibi_slopes.strides[0] = has_batch ? extras.alibi_slopes.stride(0) : 0;
    parameters.alibi_slopes.strides[1] = extras.alibi_slopes.stride(-1);
  }
  if (sinks.has_value()) {
    extras.sinks = sinks->to(type);
    parameters.has_sinks = true;
    parameters.sinks.data = extras.sinks.data_ptr();
    parameters.sinks.strides[1] = extras.sinks.stride(0);
  }
  // A factor that is not positive would turn the largest product into the smallest score.
  parameters.modifies = parameters.softcap > 0.0 || parameters.bias_kind != kNone ||
                        parameters.has_alibi_slopes ||
                        !(parameters.scale > 0.0 && std::isfinite(parameters.scale));
  parameters.factor = parameters.modifies ? kLog2E : kLog2E * parameters.scale;
  parameters.kept_scale = 1.0 / (1.0 - options.dropout_p);
  if (options.dropout_p > 0.0) {
    // A weight is kept if its 32 random bits are at least this.
    const double threshold = std::round(options.dropout_p * 4294967296.0);
    parameters.dropout_threshold =
        std::clamp<int64_t>(static_cast<int64_t>(threshold), 1, (int64_t{1} << 32) - 1);
    parameters.seed = *seed->const_data_ptr<int64_t>();
  }
}

std::optional<at::Tensor> draw_seed(const at::Tensor& query, double dropout_p) {
  if (dropout_p <= 0.0) {
    return std::nullopt;
  }
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, query.options().dtype(at::kLong));
}

ScratchPool& scratch_pool() {
  static auto* pool = new ScratchPool();
  return *pool;
}

std::vector<Piece> cut_into_blocks(const Parameters& parameters,
                                   const std::vector<Sequence>& sequences,
                                   const AttentionOptions& options) {
  return cut_into_blocks_of(parameters, sequences, options, usual_block());
}

void PartialResults::allocate(Parameters& parameters, int64_t parts, int64_t slots, int64_t rows,
                              at::ScalarType type) {
  const auto of_type = at::TensorOptions().dtype(type).device(at::kCPU);
  output_ = at::empty({parts, slots, rows, round_up_to_vector(parameters.value_dim)}, of_type);
  largest_ = at::empty({parts, slots, rows}, of_type);
  total_ = at::empty({parts, slots, rows}, of_type);
  parameters.partial_output = Operand(output_);
  parameters.partial_largest = Operand(largest_);
  parameters.partial_total = Operand(total_);
}

void compute_statistics(Parameters& parameters, PartialResults& results, std::vector<Piece>& blocks,
                        const at::Tensor& query) {
  const auto type = compute_type(query);
  const auto is_large =
      type == at::kDouble ? &has_large_logsumexp<double> : &has_large_logsumexp<float>;
  std::vector<Piece> pieces;
  int64_t rows = 0;
  for (Piece& block : blocks) {
    if (is_large(parameters, block)) {
      block.statistics = static_cast<int64_t>(pieces.size());
      rows = std::max(rows, rows_of(block));
      pieces.push_back(block);
      pieces.back().slot = block.statistics;
    }
  }
  if (!pieces.empty()) {
    results.allocate(parameters, 1, static_cast<int64_t>(pieces.size()), rows, type);
    auto* const kernel = forward_kernel(parameters).get<AttentionFunction>(query.scalar_type());
    run_pieces(parameters, kernel, std::move(pieces));
  }
}

void run_forward(Parameters& parameters, const at::Tensor& query,
                 const std::vector<Sequence>& sequences, const AttentionOptions& options) {
  std::vector<Piece> blocks =
      cut_into_blocks_of(parameters, sequences, options, forward_block(parameters, sequences));
  const auto type = compute_type(query);
  const auto dtype = query.scalar_type();
  const int64_t count = static_cast<int64_t>(blocks.size());
  if (count == 0) {
    return;
  }
  std::vector<Piece> pieces = split_keys(blocks, ceil_divide(kEnoughPieces, count));
  std::vector<Piece> split = take_if(blocks, [](const Piece& piece) { return piece.parts > 1; });
  int64_t parts = 0, rows = 0;
  for (const Piece& piece : split) {
    parts = std::max(parts, piece.parts);
    rows = std::max(rows, rows_of(piece));
  }
  PartialResults partial;
  if (!split.empty()) {
    partial.allocate(parameters, parts, static_cast<int64_t>(split.size()), rows, type);
  }
  if (!parameters.modifies && !has_16_registers()) {
    pieces = merge_neighbours(parameters, std::move(pieces), rows);
  }
  const std::vector<Piece> few =
      take_if(pieces, [](const Piece& piece) { return rows_of(piece) <= kFewQueries; });
  if (!few.empty()) {
    run_pieces(parameters, decode_kernel(parameters).get<AttentionFunction>(dtype), few);
  }
  if (!pieces.empty()) {
    run_pieces(parameters, forward_kernel(parameters).get<AttentionFunction>(dtype), pieces);
  }
  if (!split.empty()) {
    run_pieces(parameters, merge_kernel().get<AttentionFunction>(dtype), split);
  }
}

}  // namespace foo
