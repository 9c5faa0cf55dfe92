// Draws the seed of dropout when foo::attention and foo::attention_varlen are differentiated or
// mapped. The operators that take the seed are differentiated in their place, see foo_ops/ops/.

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/below_autograd.h"
#include "launch/operator_counts.h"
#include "launch/registration.h"
#include "ops/attention/checks.h"
#include "ops/attention/parameters.h"

namespace foo {

namespace {

using at::Tensor;
using c10::OperatorHandle;
using OptionalTensor = std::optional<Tensor>;
using torch::jit::Stack;

// Fake tensors have no elements, and tensors under torch.vmap and torch.compile wrap others.
bool has_elements(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kWithin(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  return !tensor.is_meta() && !tensor.key_set().has_any(kWithin);
}

bool has_elements(const OptionalTensor& tensor) {
  return !tensor.has_value() || has_elements(*tensor);
}

void check(const AttentionArguments& given) {
  check_attention(given);
  const auto& inputs = given.inputs();
  if (given.has(ArgumentPlaces::kCuSeqlensQ) && has_elements(inputs.cu_seqlens_q) &&
      has_elements(inputs.cu_seqlens_k) && has_elements(inputs.seqused_k) &&
      has_elements(inputs.block_table)) {
    check_attention_sequences(inputs, given.options());
  }
}

// Returns the seed of a call's dropout, and its heads' numbers if these are only a part of all.
std::tuple<Tensor, OptionalTensor> dropout_numbers(const Tensor& query, c10::SymInt batch) {
  return {draw_seed(query), std::nullopt};
}

// DTensor has a rule of its own for foo::attention_dropout_numbers.
std::tuple<Tensor, OptionalTensor> draw_below_autograd(const AttentionArguments& given) {
  static const auto draw =
      find_operator("foo::attention_dropout_numbers").typed<decltype(dropout_numbers)>();
  const auto& inputs = given.inputs();
  const at::AutoDispatchBelowAutograd guard;
  return draw.call(inputs.query, batch_of(inputs));
}

// An operator that draws the seed of its dropout.
template <Name name>
struct Unseeded {
  static AttentionArguments arguments(const OperatorHandle& op, const Stack& stack) {
    static const ArgumentPlaces places(op.schema());
    return {places, torch::jit::last(stack, op.schema().arguments().size())};
  }

  // Calls the operator that takes the numbers of dropout in its place.
  static void call_seeded(const OperatorHandle& op, Stack* stack, OptionalTensor seed,
                          OptionalTensor dropout_heads) {
    static const NamedCall seeded(std::string(name.text) + "_seeded", names_in(op.schema()));
    auto values = torch::jit::pop(*stack, op.schema().arguments().size());
    values.emplace_back(std::move(seed));
    values.emplace_back(std::move(dropout_heads));
    for (auto& result : seeded(std::move(values))) stack->push_back(std::move(result));
  }

 private:
  static std::vector<std::string> names_in(const c10::FunctionSchema& schema) {
    std::vector<std::string> names;
    for (const auto& argument : schema.arguments()) names.push_back(argument.name());
    names.insert(names.end(), {"seed", "dropout_heads"});
    return names;
  }
};

// Autograd kernel of the operators that draw their seed. Differentiates the operator that takes a
// seed in their place, so that the backward pass gets the seed, too. A refused call leaves the
// generator as it was.
template <Name name>
void draw_and_differentiate(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (!needs_gradient(op, *stack) && !has_tangent(op, *stack)) {
    redispatch_below_autograd(op, keys, stack);
    return;
  }
  const auto given = Unseeded<name>::arguments(op, *stack);
  OptionalTensor seed, dropout_heads;
  if (given.options().dropout_p > 0.0) {
    check(given);
    std::tie(seed, dropout_heads) = draw_below_autograd(given);
  }
  Unseeded<name>::call_seeded(op, stack, std::move(seed), std::move(dropout_heads));
}

bool will_be_cast(const Tensor& query) {
  const auto type = query.device().type();
  return at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
}

// Under torch.vmap a torch operator draws the seed, which follows the argument ``randomness``: one
// seed for all, one for each, or an error. The check applies to a slice, with the operator's own
// messages; under autocast it must wait until the dtypes are equal.
template <Name name>
void draw_for_vmap(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto given = Unseeded<name>::arguments(op, *stack);
  const auto query = given.inputs().query;
  if (!will_be_cast(query)) check(given);
  if (given.options().dropout_p > 0.0) {
    Unseeded<name>::call_seeded(op, stack, draw_seed(query), std::nullopt);
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

TORCH_LIBRARY_IMPL(foo, CompositeImplicitAutograd, library) {
  library.impl("attention_dropout_numbers", &dropout_numbers);
}

// Under torch.vmap of a gradient the call comes here, below autograd, and torch's operator that
// draws follows the argument ``randomness``.
TORCH_LIBRARY_IMPL(foo, FuncTorchBatched, library) {
  library.impl("attention_dropout_numbers", &dropout_numbers);
}

TORCH_LIBRARY_IMPL(foo, Autograd, library) {
  library.impl("attention", boxed<&draw_and_differentiate<"foo::attention">>());
  library.impl("attention_varlen", boxed<&draw_and_differentiate<"foo::attention_varlen">>());
}

TORCH_LIBRARY_IMPL(foo, FuncTorchVmapMode, library) {
  library.impl("attention", boxed<&draw_for_vmap<"foo::attention">>());
  library.impl("attention_varlen", boxed<&draw_for_vmap<"foo::attention_varlen">>());
}

}  // namespace foo
