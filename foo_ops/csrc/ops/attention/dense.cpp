#include "ops/attention/dense.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/autograd.h"
#include "launch/kernel_table.h"
#include "launch/lasting.h"
#include "launch/memory.h"
#include "launch/registration.h"
#include "ops/attention/arguments.h"
#include "ops/attention/passes.h"

namespace foo {

namespace {

Kernel& dropout_mask_kernel() {
  static auto* kernel = new Kernel("attention_dropout_mask");
  return *kernel;
}

// Views the bias with four dimensions.
at::Tensor with_four_dimensions(const at::Tensor& bias) {
  at::Tensor result = bias;
  while (result.dim() < 4) {
    result = result.unsqueeze(0);
  }
  return result;
}

void set_bias(Parameters& parameters, const at::Tensor& bias, at::ScalarType query_type) {
  const at::Tensor stored = with_four_dimensions(bias);
  parameters.bias_kind = bias.scalar_type() == at::kBool    ? kBool
                         : bias.scalar_type() == query_type ? kOfQueryDtype
                                                            : kFloat32;
  parameters.bias_rows = stored.size(2);
  parameters.bias_columns = stored.size(3);
  parameters.attn_bias = Operand(stored.expand(
      {parameters.batch, parameters.query_heads, parameters.query_length, parameters.key_length}));
}

}  // namespace

Parameters make_parameters(const AttentionInputs& inputs) {
  Parameters parameters{};
  parameters.batch = inputs.query.size(0);
  parameters.query_heads = inputs.query.size(1);
  parameters.key_heads = inputs.key.size(1);
  parameters.group = parameters.key_heads == 0 ? 1 : parameters.query_heads / parameters.key_heads;
  parameters.query_length = inputs.query.size(2);
  parameters.key_length = inputs.key.size(2);
  parameters.head_dim = inputs.query.size(3);
  parameters.value_dim = inputs.value.size(3);
  parameters.query = Operand(inputs.query);
  parameters.key = Operand(inputs.key);
  parameters.value = Operand(inputs.value);
  if (inputs.attn_bias.has_value()) {
    set_bias(parameters, *inputs.attn_bias, inputs.query.scalar_type());
  }
  return parameters;
}

std::vector<Sequence> sequences_of(const Parameters& parameters) {
  std::vector<Sequence> sequences;
  for (int64_t batch = 0; batch < parameters.batch; ++batch) {
    sequences.push_back({batch, 0, parameters.query_length, 0, parameters.key_length});
  }
  return sequences;
}

at::Tensor make_output(const at::Tensor& query, int64_t value_dim) {
  const auto batch = query.size(0), heads = query.size(1), rows = query.size(2);
  if (query.stride(1) < query.stride(2)) {
    return new_tensor({batch, rows, heads, value_dim}, query.options()).transpose(1, 2);
  }
  return new_tensor({batch, heads, rows, value_dim}, query.options());
}

at::Tensor make_logsumexp(const at::Tensor& query) {
  return new_tensor({query.size(0), query.size(1), query.size(2)},
                    query.options().dtype(compute_type(query)));
}

namespace {

using Outputs = std::tuple<at::Tensor, at::Tensor>;

// A call with no other tensors than query, key and value, on more keys or on fewer.
class LastingAttention final : public LastingCall {
 public:
  LastingAttention(const Parameters& parameters, const AttentionArguments& arguments,
                   Outputs outputs)
      : parameters_(parameters),
        sequences_(sequences_of(parameters)),
        options_(arguments.options()),
        dtype_(arguments.inputs().query.scalar_type()),
        outputs_(std::move(outputs)) {}

  static bool fits(const AttentionArguments& arguments) {
    const auto& inputs = arguments.inputs();
    return arguments.options().dropout_p == 0.0 && !inputs.attn_bias.has_value() &&
           !inputs.alibi_slopes.has_value() && !inputs.sinks.has_value();
  }

  bool run(TensorArguments arguments) override {
    if (arguments.size() != 3) return false;
    const at::Tensor &query = *arguments[0], &key = *arguments[1], &value = *arguments[2];
    const int64_t keys = key.dim() == 4 ? key.size(2) : 0;
    const Parameters& known = parameters_;
    const bool are_alike =
        is_alike(query, {known.batch, known.query_heads, known.query_length, known.head_dim}) &&
        is_alike(key, {known.batch, known.key_heads, keys, known.head_dim}) &&
        is_alike(value, {known.batch, known.key_heads, keys, known.value_dim});
    if (!are_alike) return false;
    parameters_.key_length = keys;
    parameters_.query = Operand(query);
    parameters_.key = Operand(key);
    parameters_.value = Operand(value);
    for (Sequence& each : sequences_) each.key_length = keys;
    run_forward(parameters_, query, sequences_, options_);
    return true;
  }

  int64_t bytes_read() const override { return sizeof(LastingAttention); }

 private:
  bool is_alike(const at::Tensor& tensor, c10::IntArrayRef sizes) const {
    return is_dense_on_cpu(tensor) && tensor.scalar_type() == dtype_ && tensor.sizes() == sizes;
  }

  Parameters parameters_;
  std::vector<Sequence> sequences_;
  AttentionOptions options_;
  c10::ScalarType dtype_;
  // Their memory is where the parameters say.
  Outputs outputs_;
};

// foo::attention and foo::attention_seeded.
Outputs attention(const AttentionArguments& arguments) {
  check_attention(arguments);
  const auto& inputs = arguments.inputs();
  const auto& options = arguments.options();
  const auto seed = seed_of(arguments, options);
  const at::Tensor output = make_output(inputs.query, inputs.value.size(3));
  const at::Tensor logsumexp = make_logsumexp(inputs.query);
  Extras extras;
  auto parameters = make_parameters(inputs);
  set_options(parameters, extras, inputs, options, seed);
  parameters.output = Operand(output);
  parameters.logsumexp = Operand(logsumexp);
  run_forward(parameters, inputs.query, sequences_of(parameters), options);
  LastingCallTaker* const taker = LastingCallTaker::of("foo::attention", inputs.query.device());
  if (taker != nullptr && LastingAttention::fits(arguments)) {
    taker->call =
        std::make_unique<LastingAttention>(parameters, arguments, Outputs(output, logsumexp));
  }
  return {output, logsumexp};
}

AttentionGradients attention_backward(const AttentionArguments& arguments) {
  check_attention(arguments);
  const auto& inputs = arguments.inputs();
  const auto& options = arguments.options();
  const auto results = arguments.results();
  Extras extras;
  auto parameters = make_parameters(inputs);
  set_options(parameters, extras, inputs, options, arguments.seed());
  parameters.output = Operand(results.output);
  parameters.logsumexp = Operand(results.logsumexp);
  parameters.grad_output = Operand(results.grad_output);
  parameters.grad_logsumexp = Operand(results.grad_logsumexp);
  return run_backward(parameters, inputs, sequences_of(parameters), options, false);
}

at::Tensor attention_dropout_mask(const at::Tensor& seed, at::IntArrayRef shape, double dropout_p,
                                  const std::optional<at::Tensor>& dropout_heads,
                                  at::ScalarType dtype) {
  check_attention_dropout_mask(seed, c10::fromIntArrayRefSlow(shape), dropout_p, dropout_heads,
                               dtype);
  const at::Tensor mask = at::empty(shape, seed.options().dtype(dtype));
  Parameters parameters{};
  parameters.batch = shape[0];
  parameters.query_heads = parameters.key_heads = shape[1];
  parameters.group = parameters.head_dim = parameters.value_dim = 1;
  parameters.query_length = shape[2];
  parameters.key_length = shape[3];
  const AttentionOptions options{.dropout_p = dropout_p};
  Extras extras;
  const AttentionInputs inputs{.query = mask,
                               .key = mask,
                               .value = mask,
                               .alibi_slopes = kNotGiven,
                               .sinks = kNotGiven,
                               .dropout_heads = dropout_heads};
  set_options(parameters, extras, inputs, options, seed);
  parameters.partial_output = Operand(mask);
  const auto blocks = cut_into_blocks(parameters, sequences_of(parameters), options);
  if (!blocks.empty()) {
    run_jobs(parameters, dropout_mask_kernel().get<AttentionFunction>(dtype),
             static_cast<int64_t>(blocks.size()), largest_of(blocks),
             [&](int64_t job, int64_t, const auto& call) { call(blocks[job]); });
  }
  return mask;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(foo, library) {
  register_boxed_kernel<"foo::attention", &attention>(library);
  register_boxed_kernel<"foo::attention_seeded", &attention>(library);
  register_boxed_kernel<"foo::attention_backward", &attention_backward>(library);
  register_shared_kernel<"foo::attention_dropout_mask", &attention_dropout_mask>(library);
}

// Draws the seed of dropout when foo::attention and foo::attention_varlen are differentiated or
// mapped. The operators that take the seed are differentiated in their place, see foo_ops/ops/.

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
