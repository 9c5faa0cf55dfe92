#include "ops/attention/run.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "launch/kernel_table.h"

namespace foo {

namespace {

// From here on, rounding of the logsumexp changes weights by more than 2^-16. With a mask of -1e9
// its digits do not tell how many keys share the weight.
constexpr double kLargeLogsumexp = 256.0;
// A thread looks at this many blocks at least: some 60 microseconds.
constexpr int64_t kBlocksToScan = 512;

// Kernels live as long as the process: they are never destroyed.
Kernel& forward_kernel(const Parameters& parameters) {
  static auto* kernel = new Kernel("attention_forward");
  static auto* plain = new Kernel("attention_forward.plain");
  static auto* programs = new Kernel("attention_forward.programs");
  if (parameters.programs != nullptr) return *programs;
  return is_plain(parameters) ? *plain : *kernel;
}

Kernel& decode_kernel(const Parameters& parameters) {
  static auto* kernel = new Kernel("attention_decode");
  static auto* plain = new Kernel("attention_decode.plain");
  static auto* int8_cache = new Kernel("attention_decode.int8_cache");
  if (parameters.has_int8_cache) return *int8_cache;
  return is_plain(parameters) ? *plain : *kernel;
}

Kernel& merge_kernel() {
  static auto* kernel = new Kernel("attention_merge");
  return *kernel;
}

// cost(piece) is for a piece's share of the work.
template <class Cost>
void run_pieces(const Parameters& parameters, AttentionFunction* kernel,
                const std::vector<Piece>& pieces, Cost cost) {
  if (pieces.empty()) return;
  const std::vector<std::vector<Piece>> shares = shares_of(pieces);
  std::vector<std::vector<double>> costs;
  for (const std::vector<Piece>& share : shares) {
    std::transform(share.begin(), share.end(), std::back_inserter(costs.emplace_back()), cost);
  }
  run_chains(
      parameters, kernel, std::move(costs), largest_of(pieces),
      [&](const JobChains::Job& job, const auto& call) { call(shares[job.chain][job.position]); });
}

void run_pieces(const Parameters& parameters, AttentionFunction* kernel,
                const std::vector<Piece>& pieces) {
  const auto of_pair = static_cast<double>(parameters.head_dim + parameters.value_dim);
  run_pieces(parameters, kernel, pieces,
             [&](const Piece& piece) { return static_cast<double>(work_of(piece)) * of_pair; });
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

}  // namespace

void PartialResults::allocate(Parameters& parameters, int64_t key_splits, int64_t slots,
                              int64_t rows, at::ScalarType type) {
  const auto of_type = at::TensorOptions().dtype(type).device(at::kCPU);
  output_ = at::empty({key_splits, slots, rows, round_up_to_vector(parameters.value_dim)}, of_type);
  largest_ = at::empty({key_splits, slots, rows}, of_type);
  total_ = at::empty({key_splits, slots, rows}, of_type);
  parameters.partial_output = Operand(output_);
  parameters.partial_largest = Operand(largest_);
  parameters.partial_total = Operand(total_);
}

void compute_statistics(Parameters& parameters, PartialResults& results, std::vector<Piece>& blocks,
                        const at::Tensor& query) {
  const auto type = compute_type(query);
  const auto is_large =
      type == at::kDouble ? &has_large_logsumexp<double> : &has_large_logsumexp<float>;
  std::vector<char> are_large(blocks.size());
  const auto count = static_cast<int64_t>(blocks.size());
  at::parallel_for(0, count, kBlocksToScan, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) are_large[i] = is_large(parameters, blocks[i]);
  });
  std::vector<Piece> pieces;
  int64_t rows = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    Piece& block = blocks[i];
    if (are_large[i]) {
      block.statistics = static_cast<int64_t>(pieces.size());
      rows = std::max(rows, rows_of(block));
      pieces.push_back(block);
      pieces.back().slot = block.statistics;
    }
  }
  if (!pieces.empty()) {
    results.allocate(parameters, 1, static_cast<int64_t>(pieces.size()), rows, type);
    auto* const kernel = forward_kernel(parameters).get<AttentionFunction>(query.scalar_type());
    run_pieces(parameters, kernel, pieces);
  }
}

void run_forward(Parameters& parameters, const at::Tensor& query,
                 const std::vector<Sequence>& sequences, const AttentionOptions& options) {
  const auto dtype = query.scalar_type();
  const ForwardPlan plan =
      plan_forward(parameters, sequences, options, MaskBounds::of(parameters, dtype, options));
  PartialResults partial;
  if (!plan.split_blocks.empty()) {
    partial.allocate(parameters, plan.key_splits, static_cast<int64_t>(plan.split_blocks.size()),
                     plan.rows, compute_type(query));
  }
  if (!plan.few_queries.empty()) {
    run_pieces(parameters, decode_kernel(parameters).get<AttentionFunction>(dtype),
               plan.few_queries);
  }
  if (!plan.pieces.empty()) {
    run_pieces(parameters, forward_kernel(parameters).get<AttentionFunction>(dtype), plan.pieces);
  }
  if (!plan.split_blocks.empty()) {
    run_pieces(
        parameters, merge_kernel().get<AttentionFunction>(dtype), plan.split_blocks,
        [&](const Piece& block) {
          return static_cast<double>(rows_of(block) * block.key_splits * parameters.value_dim);
        });
  }
}

}  // namespace foo
