#include "ops/attention/dense.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launch/huge_pages.h"
#include "launch/kernel_table.h"
#include "launch/operator_counts.h"
#include "ops/attention/backward.h"
#include "ops/attention/checks.h"
#include "ops/attention/run.h"

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
  return at::empty({query.size(0), query.size(1), query.size(2)},
                   query.options().dtype(compute_type(query)));
}

namespace {

using Outputs = std::tuple<at::Tensor, at::Tensor>;

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

}  // namespace foo
