// Users' programs on score tiles, which attention's kernels call: see
// foo_ops/kernels/attention/programs.py.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/attention/arguments.h"
#include "ops/attention/plan.h"

namespace foo {

// State of a window, or of a block of keys, for a row of query blocks.
enum BlockState : uint8_t { kHidden, kMasked, kSeen, kMixed };

// Description of a captured tensor for the kernel.
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

// Arguments that all calls of programs share.
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

// Applies programs to a score tile of `queries` and `keys`, which begins at `first_query` and
// `first_key`. Gradients of captured tensors are summed per chunk of a key head. A function of the
// family attention_mask writes the number of scores that mask_mod lets through to ``gradients``, as
// an int64.
using ProgramFunction = void(const ProgramArguments* arguments, void* scores, void* gradients,
                             int64_t queries, int64_t keys, int64_t first_query, int64_t first_key,
                             int64_t batch, int64_t head, int64_t key_head, int64_t chunk);

// Keys that each row of query blocks sees: the lists of torch's BlockMask.
struct BlockMask {
  const std::optional<at::Tensor>& kv_num_blocks;
  const std::optional<at::Tensor>& kv_indices;
  const std::optional<at::Tensor>& full_kv_num_blocks;
  const std::optional<at::Tensor>& full_kv_indices;
  int64_t query_block, key_block;
};

// Texts of the programs, empty if not given, and their inputs.
struct Programs {
  std::string_view score_mod, mask_mod, backward;
  at::TensorList captured;
  c10::ArrayRef<double> numbers;
  c10::IntArrayRef integers;
};

// States of all blocks of a call. The parameters point to them.
class BlockStates {
 public:
  // Sets the states from a block mask.
  BlockStates(Parameters& parameters, const BlockMask& mask, bool has_mask_mod);

  // Without a block mask, counts how many scores mask_mod lets through in each square of a window
  // of keys and as many queries. Counts per sequence, or once for all of them, and likewise for
  // heads.
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

// Data that the programs need while a call runs. The parameters point to it.
class ProgramCall {
 public:
  // `parameters` must be complete except for programs. A backward pass passes which captured
  // tensors require a gradient.
  ProgramCall(Parameters& parameters, const std::vector<Sequence>& sequences,
              const Programs& programs, const BlockMask& mask, at::ScalarType compute_type,
              std::vector<bool> requires_grad = {});
  ProgramCall(const ProgramCall&) = delete;

  // Returns which blocks add to the same gradients of captured tensors, because these are too large
  // for separate sums.
  SharedSums sharing() const;
  // Whether blocks of one chunk add to the same gradients of captured tensors.
  bool has_sums() const;
  // Allocates the sums of a backward pass for this many chunks.
  void allocate_gradients(int64_t chunks);
  // Returns the gradients, empty if not required.
  std::vector<at::Tensor> gradients() const;

  // Raises an IndexError if a captured tensor was indexed out of bounds.
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
