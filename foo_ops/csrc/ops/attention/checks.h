// The arguments of attention's operators, and their checks, which fake kernels share.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "launch/operator_counts.h"

namespace foo {

// Options of attention's operators. Dense calls have no max_seqlen_k, packed ones no is_causal.
struct AttentionOptions {
  bool is_causal = false;
  std::optional<double> scale;
  double dropout_p = 0.0;
  c10::SymInt window_left = -1;
  c10::SymInt window_right = -1;
  double softcap = 0.0;
  c10::SymInt max_seqlen_q = 0;
  c10::SymInt max_seqlen_k = 0;
  // If set, the keys are only a part of all: query i stands at the key i + part_offset, and the
  // backward pass gets the logsumexp of all keys.
  std::optional<c10::SymInt> part_offset;
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
  // Head numbers, (B, Hq), if these are only a part of all heads: dropout draws by them.
  const std::optional<at::Tensor>& dropout_heads = kNotGiven;
};

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
  enum Name {
    kQuery,
    kKey,
    kValue,
    kCuSeqlensQ,
    kCuSeqlensK,
    kGradOutput,
    kGradLogsumexp,
    kOutput,
    kLogsumexp,
    kBiasRequiresGrad,
    kIsCausal,
    kScale,
    kDropoutP,
    kWindowLeft,
    kWindowRight,
    kSoftcap,
    kMaxSeqlenQ,
    kMaxSeqlenK,
    kPartOffset,
    // The optional tensors.
    kAttnBias,
    kAlibiSlopes,
    kSinks,
    kSequsedK,
    kBlockTable,
    kSeed,
    kDropoutHeads,
    kNames,
  };

  explicit ArgumentPlaces(const c10::FunctionSchema& schema);

  // Returns the argument's index, or -1 if the operator has no such argument.
  int64_t operator[](Name name) const { return places_[name]; }

 private:
  std::array<int64_t, kNames> places_;
};

// Arguments of a boxed call. The values must outlive this, and this all that it returns.
class AttentionArguments {
 public:
  AttentionArguments(const ArgumentPlaces& places, c10::ArrayRef<c10::IValue> values);

  AttentionInputs inputs() const;
  AttentionResults results() const;
  AttentionOptions options() const;
  const std::optional<at::Tensor>& seed() const { return optional(ArgumentPlaces::kSeed); }
  bool attn_bias_requires_grad() const;

 private:
  static constexpr auto kFirstOptional = ArgumentPlaces::kAttnBias;

  const at::Tensor& tensor(ArgumentPlaces::Name name) const;
  const std::optional<at::Tensor>& optional(ArgumentPlaces::Name name) const {
    return optionals_[name - kFirstOptional];
  }

  const ArgumentPlaces& places_;
  c10::ArrayRef<c10::IValue> values_;
  std::array<std::optional<at::Tensor>, ArgumentPlaces::kNames - kFirstOptional> optionals_;
};

// Wraps a function of AttentionArguments that returns a tuple of tensors as a boxed kernel.
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

// Like register_shared_kernel, for operators whose calls are rare enough to be boxed.
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

// Checks of the operators' arguments, which raise. ``name`` is the operator's, if several share a
// check. They read only metadata, so that they serve eager tensors and fake ones with symbolic
// sizes alike.
void check_dense(const char* name, const AttentionInputs& inputs);
void check_attention(const AttentionInputs& inputs, const AttentionOptions& options);
void check_packed(const char* name, const AttentionInputs& inputs);
void check_attention_varlen(const AttentionInputs& inputs, const AttentionOptions& options);

// Raises for sequences and blocks that are not inside the tensors. Reads the integer tensors'
// elements; the other arguments must have been checked.
void check_attention_sequences(const AttentionInputs& inputs, const AttentionOptions& options);

// Raises if outputs of a forward pass, or their gradients, do not fit its inputs.
void check_attention_results(const char* name, const at::Tensor& grad_output,
                             const at::Tensor& grad_logsumexp, const at::Tensor& query,
                             const at::Tensor& value, const at::Tensor& output,
                             const at::Tensor& logsumexp);

// Only a bias of floating-point numbers has a gradient.
void check_attention_bias(const std::optional<at::Tensor>& attn_bias, bool attn_bias_requires_grad);

// A seed must be given exactly if there is dropout.
void check_attention_seed(const char* name, const at::Tensor& query,
                          const std::optional<at::Tensor>& seed, double dropout_p);

// dropout_heads may be given only with a seed.
void check_attention_dropout_heads(const char* name, const at::Tensor& query,
                                   const std::optional<at::Tensor>& dropout_heads,
                                   const c10::SymInt& batch);

}  // namespace foo
