// The arguments of attention's operators, and their checks, which fake kernels share.

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

#include "launch/operator_counts.h"

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

}  // namespace foo
