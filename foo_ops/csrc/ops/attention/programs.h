// Users' programs for score tiles, which kernels of attention call: see
// foo_ops/kernels/attention/programs.py.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/attention/parameters.h"
#include "ops/attention/plan.h"

namespace foo {

// What a window, or a block of keys, holds for the queries of a row of blocks.
enum BlockState : uint8_t { kHidden, kMasked, kSeen, kMixed };

// What is told of a captured tensor.
struct CapturedTensor {
  static constexpr int64_t kMostDimensions = 5;

  const void* data = nullptr;
  void* gradient = nullptr;
  int64_t of_batch = 0, of_head = 0, of_chunk = 0;
  int64_t sizes[kMostDimensions] = {}, strides[kMostDimensions] = {};
  int64_t gradient_strides[kMostDimensions] = {};
};

template <>
struct Layout<CapturedTensor> {
  using Struct = CapturedTensor;
  static constexpr const char* name = "CapturedTensor";
  static constexpr Field fields[] =
      FOO_FIELDS(data, gradient, of_batch, of_head, of_chunk, sizes, strides, gradient_strides);
};
static_assert(is_whole<CapturedTensor>());

// The arguments of all calls of programs.
struct ProgramArguments {
  double scale = 1.0;
  const double* numbers = nullptr;
  const int64_t* integers = nullptr;
  const CapturedTensor* captured = nullptr;
  int64_t* outside = nullptr;
};

template <>
struct Layout<ProgramArguments> {
  using Struct = ProgramArguments;
  static constexpr const char* name = "ProgramArguments";
  static constexpr Field fields[] = FOO_FIELDS(scale, numbers, integers, captured, outside);
};
static_assert(is_whole<ProgramArguments>());

// Applies programs to so many queries and keys of a score tile, which ones these are. Gradients of
// captured tensors are summed for the chunk of a key head. A function of the family attention_mask
// writes the number of scores that mask_mod lets through to ``gradients``, as an int64.
using ProgramFunction = void(const ProgramArguments* arguments, void* scores, void* gradients,
                             int64_t queries, int64_t keys, int64_t first_query, int64_t first_key,
                             int64_t batch, int64_t head, int64_t key_head, int64_t chunk);

// Which keys the queries of a row of blocks see: the lists of torch's BlockMask.
struct BlockMask {
  const std::optional<at::Tensor>& kv_num_blocks;
  const std::optional<at::Tensor>& kv_indices;
  const std::optional<at::Tensor>& full_kv_num_blocks;
  const std::optional<at::Tensor>& full_kv_indices;
  int64_t query_block, key_block;
};

// The texts of programs, empty where there is none, and what they take.
struct Programs {
  std::string_view score_mod, mask_mod, backward;
  at::TensorList captured;
  c10::ArrayRef<double> numbers;
  c10::IntArrayRef integers;
};

// The states of all blocks of a call. Parameters point to them.
class BlockStates {
 public:
  // What a mask of blocks says.
  BlockStates(Parameters& parameters, const BlockMask& mask, bool has_mask_mod);

  // Where there is none, asks how many scores a mask_mod lets through, for each window and as many
  // queries of a sequence. The answers are for each sequence, or for the first one for all of them,
  // and for heads alike.
  void ask(Parameters& parameters, const std::vector<Sequence>& sequences, ProgramFunction* counts,
           const ProgramArguments& arguments, bool of_sequence, bool of_head);

 private:
  void set(Parameters& parameters, int64_t query_block);
  void read(const at::Tensor& counts, const at::Tensor& indices, const char* name,
            BlockState state);
  void set_windows(int64_t key_length);

  int64_t rows_ = 1, columns_ = 1, key_block_;
  std::vector<uint8_t> blocks_, windows_;
};

// What a call's programs need as long as it runs. The parameters point to it.
class ProgramCall {
 public:
  // Parameters have everything but programs. For a backward pass it is told which captured tensors
  // require a gradient.
  ProgramCall(Parameters& parameters, const std::vector<Sequence>& sequences,
              const Programs& programs, const BlockMask& mask, at::ScalarType compute_type,
              std::vector<bool> requires_grad = {});
  ProgramCall(const ProgramCall&) = delete;

  // Which blocks add to the same gradients of captured tensors, because those are too large for all
  // to have sums of their own.
  SharedSums sharing() const;
  // Makes room for the sums of a backward pass in so many chunks.
  void allocate_gradients(int64_t chunks);
  // The gradients, without elements where none is required.
  std::vector<at::Tensor> gradients() const;

  // Raises an IndexError if a captured tensor was indexed outside.
  void check_indices(const char* name) const;

 private:
  Parameters& parameters_;
  const Programs& programs_;
  at::ScalarType type_;
  std::vector<bool> requires_grad_;
  std::string backward_;
  std::vector<CapturedTensor> captured_;
  std::vector<at::Tensor> sums_;
  ProgramArguments arguments_;
  BlockStates states_;
  int64_t outside_ = 0;
};

}  // namespace foo
