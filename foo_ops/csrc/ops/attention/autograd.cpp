// Draws the seed of dropout when foo::attention and foo::attention_varlen are differentiated or
// mapped. The operators that take the seed are differentiated in their place, see foo_ops/ops/.

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include "launch/below_autograd.h"
#include "launch/registration.h"
#include "ops/attention/checks.h"
#include "ops/attention/parameters.h"

namespace foo {

namespace {

using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

// Fake tensors have no elements, and tensors under torch.vmap and torch.compile wrap others.
bool has_elements(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kWithin(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  return !tensor.is_meta() && !tensor.key_set().has_any(kWithin);
}

bool has_elements(const std::optional<Tensor>& tensor) {
  return !tensor.has_value() || has_elements(*tensor);
}

// Traits of an operator that draws the seed of its dropout: the operator that takes the seed after
// its tensors, the number of these tensors, and the check of its arguments.
struct DenseAttention {
  static constexpr const char* kSeeded = "foo::attention_seeded";
  static constexpr int64_t kTensors = 6;

  static void check(const AttentionArguments& given) {
    check_attention(given.inputs(), given.options());
  }
};

struct PackedAttention {
  static constexpr const char* kSeeded = "foo::attention_varlen_seeded";
  static constexpr int64_t kTensors = 9;

  static void check(const AttentionArguments& given) {
    const auto inputs = given.inputs();
    check_attention_varlen(inputs, given.options());
    if (has_elements(inputs.cu_seqlens_q) && has_elements(inputs.cu_seqlens_k) &&
        has_elements(inputs.seqused_k) && has_elements(inputs.block_table)) {
      check_attention_sequences(inputs, given.options());
    }
  }
};

// Returns the arguments on the stack of an operator that draws its seed.
template <class Own>
AttentionArguments arguments_of(const OperatorHandle& op, const Stack& stack) {
  static const ArgumentPlaces places(op.schema());
  return {places, torch::jit::last(stack, op.schema().arguments().size())};
}

double dropout_of(const OperatorHandle& op, const Stack& stack) {
  const size_t count = op.schema().arguments().size();
  const auto index = op.schema().argumentIndexWithName("dropout_p");
  return torch::jit::peek(stack, *index, count).toDouble();
}

// Calls the operator that takes a seed in place of the one that draws it.
template <class Own>
void call_seeded(const OperatorHandle& op, Stack* stack) {
  static const auto seeded = find_operator(Own::kSeeded);
  const auto first = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  const auto seed = draw_seed(first->toTensor(), dropout_of(op, *stack));
  stack->insert(first + Own::kTensors, c10::IValue(seed));
  seeded.callBoxed(stack);
}

// Autograd kernel of the operators that draw their seed. Differentiates the operator that takes a
// seed in their place, so that the backward pass gets the seed, too. A refused call leaves the
// generator as it was.
template <class Own>
void draw_and_differentiate(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (!needs_gradient(op, *stack) && !has_tangent(op, *stack)) {
    redispatch_below_autograd(op, keys, stack);
    return;
  }
  if (dropout_of(op, *stack) > 0.0) {
    Own::check(arguments_of<Own>(op, *stack));
  }
  call_seeded<Own>(op, stack);
}

bool will_be_cast(const Tensor& query) {
  const auto type = query.device().type();
  return at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
}

// Under torch.vmap a torch operator draws the seed, which follows the argument ``randomness``: one
// seed for all, one for each, or an error. The check applies to a slice, with the operator's own
// messages; under autocast it must wait until the dtypes are equal.
template <class Own>
void draw_for_vmap(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto given = arguments_of<Own>(op, *stack);
  if (!will_be_cast(given.inputs().query)) {
    Own::check(given);
  }
  if (dropout_of(op, *stack) > 0.0) {
    call_seeded<Own>(op, stack);
    return;
  }
  constexpr auto kKey = c10::DispatchKey::FuncTorchVmapMode;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

}  // namespace

TORCH_LIBRARY_IMPL(foo, Autograd, library) {
  library.impl("attention", boxed<&draw_and_differentiate<DenseAttention>>());
  library.impl("attention_varlen", boxed<&draw_and_differentiate<PackedAttention>>());
}

TORCH_LIBRARY_IMPL(foo, FuncTorchVmapMode, library) {
  library.impl("attention", boxed<&draw_for_vmap<DenseAttention>>());
  library.impl("attention_varlen", boxed<&draw_for_vmap<PackedAttention>>());
}

}  // namespace foo
