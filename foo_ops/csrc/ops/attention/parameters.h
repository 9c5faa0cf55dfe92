// Structs and constants that launchers and kernels of attention share.
// tests/project/test_agreement.py compares all of them with foo_ops/kernels.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "launch/layout.h"
#include "ops/attention/checks.h"

namespace foo {

// Most queries of a block, and of a tile that holds all queries of its block.
inline constexpr int64_t kQueryBlock = 1024;
inline constexpr int64_t kTileStride = 176;
// Keys of a tile.
inline constexpr int64_t kKeyBlock = 128;
// The first key visited is a multiple of this.
inline constexpr int64_t kKeyMultiple = 8;
// Elements of the compute type in the widest vector.
inline constexpr int64_t kWidestVector = 16;
// Widest panel of queries; the width of each panel divides this.
inline constexpr int64_t kWidestPanel = 64;
// A block of this many queries or fewer is computed with vectors along the head dimension.
inline constexpr int64_t kFewQueries = 8;
// Products may be padded with rows of zeros up to a multiple of this.
inline constexpr int64_t kRowMultiple = 32;
// Position beyond all others, far from overflow.
inline constexpr int64_t kFar = int64_t{1} << 40;
// Scores and maxima are in units of log 2.
inline constexpr double kLog2E = 1.4426950408889634;

enum BiasKind : int64_t { kNone, kBool, kOfQueryDtype, kFloat32 };
// One block writes a tile of the gradient, or blocks add to sums.
enum BiasGradientKind : int64_t { kNotWanted, kStored, kAdded };

// A tensor of up to four dimensions: data, and strides in elements for batch, head, row, column.
struct Operand {
  void* data = nullptr;
  int64_t strides[4] = {0, 0, 0, 0};

  Operand() = default;
  // The shape is (batch, heads, rows, columns), or a prefix of it. The pointer is const: a mutable
  // one would copy an input whose storage is copy-on-write. Outputs are new and share no storage.
  explicit Operand(const at::Tensor& tensor) : data(const_cast<void*>(tensor.const_data_ptr())) {
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      strides[i] = tensor.stride(i);
    }
  }
};

template <>
struct Layout<Operand> {
  using Struct = Operand;
  static constexpr const char* name = "Operand";
  static constexpr Field fields[] = FOO_FIELDS(data, strides);
};
static_assert(is_whole<Operand>());

// Parameters of all blocks of a call.
struct Parameters {
  double scale, factor, softcap, dropout_scale;
  int64_t head_dim, value_dim, query_heads, group, key_heads, batch;
  int64_t modifies, bias_kind, bias_rows, bias_columns, bias_gradient;
  int64_t has_alibi_slopes, has_sinks, dropout_threshold, seed, has_dropout_heads, is_part;
  int64_t page_size, block_table_stride, query_length, key_length, chunks, has_int8_cache;
  // Addresses of programs' kernels, or 0, and the block mask: see programs.h.
  int64_t score_function, masked_score_function, gradient_function;
  int64_t windows, mask_batch_stride, mask_head_stride, mask_columns;
  int64_t mask_query_block, mask_key_block;
  // Addresses of functions of the backward pass: see Turns in backward.cpp.
  int64_t begin_turn, end_turn;
  const int32_t* block_table;
  const int64_t* programs;
  const uint8_t *window_states, *block_states;
  Operand query, key, value, attn_bias, alibi_slopes, sinks, output, logsumexp;
  Operand grad_output, grad_logsumexp, grad_query, grad_key, grad_value, grad_attn_bias;
  Operand grad_alibi_slopes, grad_sinks, partial_output, partial_largest, partial_total;
  Operand key_scale, value_scale, dropout_heads;
};

template <>
struct Layout<Parameters> {
  using Struct = Parameters;
  static constexpr const char* name = "Parameters";
  static constexpr Field fields[] = FOO_FIELDS(
      scale, factor, softcap, dropout_scale, head_dim, value_dim, query_heads, group, key_heads,
      batch, modifies, bias_kind, bias_rows, bias_columns, bias_gradient, has_alibi_slopes,
      has_sinks, dropout_threshold, seed, has_dropout_heads, is_part, page_size, block_table_stride,
      query_length, key_length, chunks, has_int8_cache, score_function, masked_score_function,
      gradient_function, windows, mask_batch_stride, mask_head_stride, mask_columns,
      mask_query_block, mask_key_block, begin_turn, end_turn, block_table, programs, window_states,
      block_states, query, key, value, attn_bias, alibi_slopes, sinks, output, logsumexp,
      grad_output, grad_logsumexp, grad_query, grad_key, grad_value, grad_attn_bias,
      grad_alibi_slopes, grad_sinks, partial_output, partial_largest, partial_total, key_scale,
      value_scale, dropout_heads);
};
static_assert(is_whole<Parameters>());

// A block of queries and a range of keys.
struct Piece {
  // The query_count queries from query_start on, for ``heads`` heads from ``head`` on, which share
  // a key head.
  int64_t batch, head, heads, query_start, query_count;
  // First row of the sequence in query and in key.
  int64_t query_offset, key_offset;
  // The keys to visit. key_start is a multiple of kKeyMultiple.
  int64_t key_start, key_stop;
  // Query i sees the keys from i + first_visible to i + last_visible, and is aligned with the key i
  // + alignment.
  int64_t first_visible, last_visible, alignment;
  // Slot for the results of a key split, or -1 if the piece has all keys of its block. The piece is
  // split key_split of key_splits.
  int64_t slot, key_split, key_splits;
  // Number of the block within its sequence and head, and the offset at which it begins in the sums
  // of the bias's gradient.
  int64_t block, bias;
  // Whether the sums of grad_key and grad_value begin with this block: for the keys that it sees
  // they are uninitialized.
  int64_t begins_sums;
  // Slot of partial_largest and partial_total from which the backward pass computes the block's
  // weights, or -1 to use the logsumexp.
  int64_t statistics;
  // In the backward pass: the chunk of the key head's pieces that it belongs to, the slot of
  // grad_key and grad_value that it adds to, the address of the chunk's Turns, and its turn.
  int64_t chunk, sums, turns, turn;
};

template <>
struct Layout<Piece> {
  using Struct = Piece;
  static constexpr const char* name = "Piece";
  static constexpr Field fields[] =
      FOO_FIELDS(batch, head, heads, query_start, query_count, query_offset, key_offset, key_start,
                 key_stop, first_visible, last_visible, alignment, slot, key_split, key_splits,
                 block, bias, begins_sums, statistics, chunk, sums, turns, turn);
};
static_assert(is_whole<Piece>());

// If ``bytes`` is given, the kernel only writes there how much scratch memory it needs for a piece,
// which does not decrease with the number of rows.
using AttentionFunction = void(const Parameters* parameters, const Piece* piece, void* scratch,
                               int64_t* bytes);

// Waits until the piece of a turn may add to the sums of a tile of keys that begins at `key`, or
// says that it has added to all keys before `key`.
using TurnFunction = void(int64_t turns, int64_t turn, int64_t key);

// gradient[row, column] = factor * the sum over the chunks of sums[chunk, row, column].
using SumFunction = void(void* gradient, int64_t row_stride, void* sums, int64_t chunk_stride,
                         int64_t width, int64_t rows, int64_t columns, int64_t chunks,
                         double factor);

// Kernels without options take half the time to compile, and suffice for most models.
inline bool is_plain(const Parameters& parameters) {
  return parameters.modifies == 0 && parameters.dropout_threshold == 0;
}

inline at::ScalarType compute_type(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Tensors in the compute type that parameters point to.
struct Extras {
  at::Tensor alibi_slopes, sinks;
};

// Sets everything that does not depend on the sequences' memory layout.
void set_options(Parameters& parameters, Extras& extras, const AttentionInputs& inputs,
                 const AttentionOptions& options, const std::optional<at::Tensor>& seed);

// Returns the seed of dropout, which an operator that takes none draws from the default generator.
std::optional<at::Tensor> seed_of(const AttentionArguments& arguments,
                                  const AttentionOptions& options);

// Draws a seed from the default generator.
at::Tensor draw_seed(const at::Tensor& query);

}  // namespace foo
