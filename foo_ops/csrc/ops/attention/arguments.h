// The arguments of attention: of operators, with their checks, which fake kernels share, and of
// kernels. tests/project/test_agreement.py compares what kernels take with foo_ops/kernels.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/kernel_table.h"
#include "launch/registration.h"

namespace foo {

// Options of attention's operators. An operator has some of them; the others keep these defaults.
struct AttentionOptions {
  bool is_causal = false;
  std::optional<double> scale;
  double dropout_p = 0.0;
  c10::SymInt window_left = -1;
  c10::SymInt window_right = -1;
  double softcap = 0.0;
  // If set, the keys are only a part of all: query i stands at the key i + part_offset, and the
  // backward pass may get the logsumexp of all keys.
  std::optional<c10::SymInt> part_offset;
  // Packed calls only.
  c10::SymInt max_seqlen_q = 0;
  c10::SymInt max_seqlen_k = 0;
  // Backward passes of dense calls only.
  bool attn_bias_requires_grad = false;
};

template <class Value>
struct AttentionOption {
  // Name in the schemas.
  const char* name;
  Value AttentionOptions::* member;
};

template <class Value>
AttentionOption(const char*, Value AttentionOptions::*) -> AttentionOption<Value>;

// All options. Calls are read by this table; tests/project/test_agreement.py compares it with the
// schemas and with foo_ops/ops/attention/formula.py.
inline constexpr std::tuple kAttentionOptions{
    AttentionOption{"is_causal", &AttentionOptions::is_causal},
    AttentionOption{"scale", &AttentionOptions::scale},
    AttentionOption{"dropout_p", &AttentionOptions::dropout_p},
    AttentionOption{"window_left", &AttentionOptions::window_left},
    AttentionOption{"window_right", &AttentionOptions::window_right},
    AttentionOption{"softcap", &AttentionOptions::softcap},
    AttentionOption{"part_offset", &AttentionOptions::part_offset},
    AttentionOption{"max_seqlen_q", &AttentionOptions::max_seqlen_q},
    AttentionOption{"max_seqlen_k", &AttentionOptions::max_seqlen_k},
    AttentionOption{"attn_bias_requires_grad", &AttentionOptions::attn_bias_requires_grad},
};

inline const at::Tensor kNoTensor;
inline const std::optional<at::Tensor> kNotGiven;

struct AttentionInputs {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const std::optional<at::Tensor>& alibi_slopes;
  const std::optional<at::Tensor>& sinks;
  // Dense calls only.
  const std::optional<at::Tensor>& attn_bias = kNotGiven;
  // Packed calls only.
  const at::Tensor& cu_seqlens_q = kNoTensor;
  const at::Tensor& cu_seqlens_k = kNoTensor;
  const std::optional<at::Tensor>& seqused_k = kNotGiven;
  const std::optional<at::Tensor>& block_table = kNotGiven;
  // Scales of an int8 cache.
  const at::Tensor& key_scale = kNoTensor;
  const at::Tensor& value_scale = kNoTensor;
  // Head numbers, (B, Hq), if these are only a part of all heads: dropout draws by them.
  const std::optional<at::Tensor>& dropout_heads = kNotGiven;
};

// Returns the number of rows of the batch, or of packed sequences.
c10::SymInt batch_of(const AttentionInputs& inputs);

// Outputs of a call, and their gradients.
struct AttentionResults {
  const at::Tensor& grad_output;
  const at::Tensor& grad_logsumexp;
  const at::Tensor& output;
  const at::Tensor& logsumexp;
};

// Positions of the arguments in an operator's schema.
class ArgumentPlaces {
 public:
  enum Tensor {
    kQuery,
    kKey,
    kValue,
    kKeyScale,
    kValueScale,
    kCuSeqlensQ,
    kCuSeqlensK,
    kGradOutput,
    kGradLogsumexp,
    kOutput,
    kLogsumexp,
    // The optional tensors.
    kAttnBias,
    kAlibiSlopes,
    kSinks,
    kSequsedK,
    kBlockTable,
    kSeed,
    kDropoutHeads,
    kTensors,
  };

  explicit ArgumentPlaces(const c10::FunctionSchema& schema);

  // The operator's name in messages: "attention" also for attention_seeded.
  const std::string& name() const { return name_; }
  bool has(Tensor tensor) const { return tensors_[tensor] >= 0; }
  // Returns the argument's index, or -1 if the operator has no such argument.
  int64_t operator[](Tensor tensor) const { return tensors_[tensor]; }
  // Same for an option of kAttentionOptions.
  int64_t option(size_t index) const { return options_[index]; }

 private:
  std::string name_;
  std::array<int64_t, kTensors> tensors_;
  std::array<int64_t, std::tuple_size_v<decltype(kAttentionOptions)>> options_;
};

// Arguments of a boxed call. The values must outlive this, and this all that it returns.
class AttentionArguments {
 public:
  AttentionArguments(const ArgumentPlaces& places, c10::ArrayRef<c10::IValue> values);
  AttentionArguments(const AttentionArguments&) = delete;
  AttentionArguments& operator=(const AttentionArguments&) = delete;

  const char* name() const { return places_.name().c_str(); }
  bool has(ArgumentPlaces::Tensor name) const { return places_.has(name); }
  const AttentionInputs& inputs() const { return inputs_; }
  const AttentionOptions& options() const { return options_; }
  AttentionResults results() const;
  const std::optional<at::Tensor>& seed() const { return optional(ArgumentPlaces::kSeed); }

 private:
  static constexpr auto kFirstOptional = ArgumentPlaces::kAttnBias;

  const at::Tensor& tensor(ArgumentPlaces::Tensor name) const;
  const std::optional<at::Tensor>& optional(ArgumentPlaces::Tensor name) const {
    return optionals_[name - kFirstOptional];
  }

  const ArgumentPlaces& places_;
  c10::ArrayRef<c10::IValue> values_;
  std::array<std::optional<at::Tensor>, ArgumentPlaces::kTensors - kFirstOptional> optionals_;
  AttentionInputs inputs_;
  AttentionOptions options_;
};

// Wraps a function of AttentionArguments that returns a tuple of tensors as a boxed kernel. From
// Python a boxed kernel is as fast as another: calls arrive on a stack.
template <Name name, auto function>
struct BoxedAttention {
  static void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    static const ArgumentPlaces places(op.schema());
    const auto values = torch::jit::last(*stack, op.schema().arguments().size());
    auto results = function(AttentionArguments(places, values));
    torch::jit::drop(*stack, values.size());
    std::apply([&](auto&... tensors) { (stack->emplace_back(std::move(tensors)), ...); }, results);
  }

  static void count_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    static OperatorCount& count = operator_count(name.text);
    count.own.fetch_add(1, std::memory_order_relaxed);
    call(op, stack);
  }
};

// Like register_shared_kernel, for functions of AttentionArguments.
template <Name name, auto function>
void register_boxed_kernel(torch::Library& library) {
  using Boxed = BoxedAttention<name, function>;
  library.impl(name.text,
               torch::dispatch(c10::DispatchKey::CPU,
                               torch::CppFunction::makeFromBoxedFunction<&Boxed::call>()));
  library.impl(name.text, torch::dispatch(
                              c10::DispatchKey::PrivateUse1,
                              torch::CppFunction::makeFromBoxedFunction<&Boxed::count_and_call>()));
  refuse_nested_tensors(library, name.text);
}

// Checks raise for arguments that an operator does not take. They read only metadata, so that they
// serve eager tensors and fake ones with symbolic sizes alike. ``name`` is the operator's, if
// several share a check.
void check_attention(const AttentionArguments& arguments);
void check_attention_int8_cache(const AttentionInputs& inputs, const AttentionOptions& options);
void check_attention_dropout_mask(const at::Tensor& seed, c10::SymIntArrayRef shape,
                                  double dropout_p, const std::optional<at::Tensor>& dropout_heads,
                                  at::ScalarType dtype);

// Sizes and dtypes of query, key and value, and of packed sequences.
void check_dense(const char* name, const AttentionInputs& inputs);
void check_packed(const char* name, const AttentionInputs& inputs);

// Windows and the soft cap.
void check_scores(const char* name, const AttentionOptions& options);

// Outputs of a forward pass, and their gradients, must fit its inputs.
void check_attention_results(const char* name, const at::Tensor& grad_output,
                             const at::Tensor& grad_logsumexp, const at::Tensor& query,
                             const at::Tensor& value, const at::Tensor& output,
                             const at::Tensor& logsumexp);

// Raises for sequences and blocks that are not inside the tensors. Reads the integer tensors'
// elements; the other arguments must have been checked.
void check_attention_sequences(const AttentionInputs& inputs, const AttentionOptions& options);

// Checks of flex.cpp.
void check_flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::vector<at::Tensor>& captured,
                          const std::optional<at::Tensor>& kv_num_blocks,
                          const std::optional<at::Tensor>& kv_indices,
                          const std::optional<at::Tensor>& full_kv_num_blocks,
                          const std::optional<at::Tensor>& full_kv_indices,
                          const c10::SymInt& query_block, const c10::SymInt& key_block);

void check_captured(const char* name, const std::vector<at::Tensor>& captured,
                    const at::Tensor& query);

// Checks which gradients of captured tensors are required.
void check_captured_requirements(const char* name, const std::vector<at::Tensor>& captured,
                                 const std::vector<bool>& requires_grad);

void check_flex_attention_varlen(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const std::vector<at::Tensor>& captured,
                                 const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                 const std::optional<at::Tensor>& seqused_k,
                                 const std::optional<at::Tensor>& block_table);

// Structs and constants that launchers and kernels of attention share.
// tests/project/test_agreement.py compares all of them with foo_ops/kernels.

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
  // Addresses of functions of the backward pass: see Turns in passes.cpp.
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
inline bool has_no_options(const Parameters& parameters) {
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
