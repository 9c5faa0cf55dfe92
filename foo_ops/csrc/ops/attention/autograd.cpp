// The first derivatives of foo::attention and foo::attention_varlen, and the seed that dropout gets
// where they are differentiated or mapped. The formulas for second derivatives
// are in foo_ops/ops/.

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "launch/registration.h"
#include "ops/attention/arguments.h"
#include "ops/attention/checks.h"
#include "ops/attention/parameters.h"

namespace foo {

namespace {

using at::Tensor;
using c10::OperatorHandle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// An operator that is differentiated, by the names of those that belong to it.
struct Form {
  // It takes the tensors of the operator that users call, then the seed, then options.
  const char* seeded;
  // They take the gradients of both outputs, the tensors, the outputs, the seed and the options.
  const char* backward;
  // The number of tensors.
  size_t inputs;
  // The inputs that backward returns gradients for.
  std::array<size_t, 6> differentiable;
};

// The place of attn_bias, where there is one.
constexpr size_t kBias = 3;

// None for a tensor that was not given.
c10::IValue optional(const Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

// Self has a Form.
template <class Self>
class Gradient : public torch::autograd::Function<Self> {
  // Edges of the graph are numbered over the tensors that were given.
  static std::vector<bool> needed_gradients(const AutogradContext& context,
                                            const variable_list& saved) {
    std::vector<bool> needed(Self::kForm.inputs);
    size_t edge = 0;
    for (size_t input = 0; input < Self::kForm.inputs; ++input) {
      needed[input] = saved[input].defined() && context.needs_input_grad(edge++);
    }
    return needed;
  }

  // Calls an operator of the backward pass and returns its results.
  static Stack call(const OperatorHandle& op, const AutogradContext& context,
                    const variable_list& gradients, const variable_list& saved,
                    const std::vector<bool>& needed) {
    Stack stack(gradients.begin(), gradients.end());
    std::transform(saved.begin(), saved.begin() + Self::kForm.inputs, std::back_inserter(stack),
                   optional);
    const Tensor& seed = saved[Self::kForm.inputs];
    stack.insert(stack.end(),
                 {saved[Self::kForm.inputs + 1], saved[Self::kForm.inputs + 2], optional(seed)});
    const auto& arguments = op.schema().arguments();
    for (size_t option = stack.size(); option < arguments.size(); ++option) {
      const std::string& name = arguments[option].name();
      stack.push_back(name == "bias_requires_grad" ? c10::IValue(needed[kBias])
                                                   : context.saved_data.at(name));
    }
    op.callBoxed(&stack);
    return stack;
  }

 public:
  static constexpr bool is_traceable = true;

  // Takes the tensors that were given, for autograd to see, and then all arguments.
  static variable_list forward(AutogradContext* context, at::TensorList, const Stack& arguments,
                               const OperatorHandle& op, c10::DispatchKeySet keys) {
    Stack stack = arguments;
    redispatch_below_autograd(op, keys, &stack);
    variable_list saved;
    for (size_t input = 0; input <= Self::kForm.inputs; ++input) {
      saved.push_back(arguments[input].toOptional<Tensor>().value_or(Tensor()));
    }
    const variable_list outputs{stack[0].toTensor(), stack[1].toTensor()};
    saved.insert(saved.end(), outputs.begin(), outputs.end());
    context->save_for_backward(saved);
    for (size_t option = Self::kForm.inputs + 1; option < arguments.size(); ++option) {
      context->saved_data[op.schema().arguments()[option].name()] = arguments[option];
    }
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto needed = needed_gradients(*context, saved);
    variable_list found(Self::kForm.inputs + 1);
    static const auto backward = find_operator(Self::kForm.backward);
    const Stack results = call(backward, *context, gradients, saved, needed);
    for (size_t i = 0; i < results.size(); ++i) {
      const size_t input = Self::kForm.differentiable[i];
      if (needed[input]) {
        found[input] = results[i].toTensor();
      }
    }
    // For each tensor that was given, and nothing for the three other arguments of forward.
    variable_list result;
    for (size_t input = 0; input < found.size(); ++input) {
      if (saved[input].defined()) {
        result.push_back(found[input]);
      }
    }
    result.resize(result.size() + 3);
    return result;
  }
};

// Fake tensors have no elements, and those under torch.vmap and torch.compile are within others.
bool has_elements(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kWithin(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  return !tensor.is_meta() && !tensor.key_set().has_any(kWithin);
}

bool has_elements(const std::optional<Tensor>& tensor) {
  return !tensor.has_value() || has_elements(*tensor);
}

struct AttentionGradient : Gradient<AttentionGradient> {
  static constexpr Form kForm{
      "foo::attention_seeded", "foo::attention_backward", 6, {0, 1, 2, kBias, 4, 5}};

  static void check(const AttentionArguments& given) {
    check_attention(given.inputs(), given.options());
  }
};

struct AttentionVarlenGradient : Gradient<AttentionVarlenGradient> {
  static constexpr Form kForm{
      "foo::attention_varlen_seeded", "foo::attention_varlen_backward", 9, {0, 1, 2, 7, 8}};

  static void check(const AttentionArguments& given) {
    const auto inputs = given.inputs();
    check_attention_varlen(inputs, given.options());
    if (has_elements(inputs.cu_seqlens_q) && has_elements(inputs.cu_seqlens_k) &&
        has_elements(inputs.seqused_k) && has_elements(inputs.block_table)) {
      check_attention_sequences(inputs, given.options());
    }
  }
};

// For the operators that are given a seed.
template <class Own>
void differentiate(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (!needs_gradient(op, *stack)) {
    redispatch_below_autograd(op, keys, stack);
    return;
  }
  const Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  variable_list given;
  for (size_t input = 0; input <= Own::kForm.inputs; ++input) {
    if (!arguments[input].isNone()) {
      given.push_back(arguments[input].toTensor());
    }
  }
  const auto results = Own::apply(at::TensorList(given), arguments, op, keys);
  torch::jit::push(*stack, results[0], results[1]);
}

// The arguments on the stack of an operator that draws its seed.
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
  static const auto seeded = find_operator(Own::kForm.seeded);
  const auto first = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  const auto seed = draw_seed(first->toTensor(), dropout_of(op, *stack));
  stack->insert(first + Own::kForm.inputs, c10::IValue(seed));
  seeded.callBoxed(stack);
}

// For the operators that draw their seed: what is differentiated is the one whose seed the backward
// pass can be given, too. A call that is refused leaves the generator as it was.
template <class Own>
void draw_and_differentiate(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (!needs_gradient(op, *stack)) {
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

// Under torch.vmap, where the seed is drawn by an operator of torch, which knows what its argument
// ``randomness`` demands: one seed for all, one for each, or an error. A call is refused
// for a slice, in its own words; but autocast is yet to come, and to make dtypes the same.
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
  library.impl("attention", boxed<&draw_and_differentiate<AttentionGradient>>());
  library.impl("attention_seeded", boxed<&differentiate<AttentionGradient>>());
  library.impl("attention_varlen", boxed<&draw_and_differentiate<AttentionVarlenGradient>>());
  library.impl("attention_varlen_seeded", boxed<&differentiate<AttentionVarlenGradient>>());
}

TORCH_LIBRARY_IMPL(foo, FuncTorchVmapMode, library) {
  library.impl("attention", boxed<&draw_for_vmap<AttentionGradient>>());
  library.impl("attention_varlen", boxed<&draw_for_vmap<AttentionVarlenGradient>>());
}

}  // namespace foo
