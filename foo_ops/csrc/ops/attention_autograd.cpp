// The first derivative of foo::attention. That of its backward operators, for second derivatives,
// is in foo_ops/ops/attention.py.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "ops/attention.h"
#include "ops/attention_work.h"

namespace foo {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Outputs = std::tuple<Tensor, Tensor>;
using Attention = Outputs(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                          const OptionalTensor&, const OptionalTensor&, bool, std::optional<double>,
                          double, int64_t, int64_t, double);
using AttentionSeeded = Outputs(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                bool, std::optional<double>, double, int64_t, int64_t, double);
using Backward = AttentionGradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                    const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                    const OptionalTensor&, const Tensor&, const Tensor&,
                                    const OptionalTensor&, bool, std::optional<double>, double,
                                    int64_t, int64_t, double);
using BiasBackward = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            const Tensor&, const Tensor&, const OptionalTensor&,
                            const OptionalTensor&, const Tensor&, const Tensor&,
                            const OptionalTensor&, bool, std::optional<double>, double, int64_t,
                            int64_t, double);

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// query, key, value, attn_bias, alibi_slopes, sinks.
constexpr size_t kInputs = 6;
constexpr size_t kBias = 3;

bool requires_gradient(const AttentionInputs& inputs) {
  const auto needs = [](const OptionalTensor& tensor) {
    return tensor.has_value() && tensor->requires_grad();
  };
  return at::GradMode::is_enabled() &&
         (inputs.query.requires_grad() || inputs.key.requires_grad() ||
          inputs.value.requires_grad() || needs(inputs.attn_bias) || needs(inputs.alibi_slopes) ||
          needs(inputs.sinks));
}

OptionalTensor given(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

class AttentionGradient : public torch::autograd::Function<AttentionGradient> {
  // Edges of the graph are numbered over the tensors that were given.
  static std::array<bool, kInputs> needed_gradients(const AutogradContext& context,
                                                    const variable_list& saved) {
    std::array<bool, kInputs> needed{};
    size_t edge = 0;
    for (size_t input = 0; input < kInputs; ++input) {
      if (saved[input].defined()) {
        needed[input] = context.needs_input_grad(edge++);
      }
    }
    return needed;
  }

  template <class Operator, class Bias>
  static auto call(const Operator& op, AutogradContext& context, const variable_list& gradients,
                   const variable_list& saved, const Bias& bias) {
    auto& options = context.saved_data;
    return op.call(gradients[0], gradients[1], saved[0], saved[1], saved[2], bias, given(saved[4]),
                   given(saved[5]), saved[7], saved[8], given(saved[6]),
                   options["is_causal"].toBool(), options["scale"].toOptional<double>(),
                   options["dropout_p"].toDouble(), options["window_left"].toInt(),
                   options["window_right"].toInt(), options["softcap"].toDouble());
  }

 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* context, c10::DispatchKeySet keys,
                               const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes,
                               const OptionalTensor& sinks, const OptionalTensor& seed,
                               bool is_causal, std::optional<double> scale, double dropout_p,
                               int64_t window_left, int64_t window_right, double softcap) {
    static const auto seeded = find<AttentionSeeded>("foo::attention_seeded");
    const at::AutoDispatchBelowAutograd guard;
    auto [output, logsumexp] = seeded.redispatch(
        keys & c10::after_autograd_keyset, query, key, value, attn_bias, alibi_slopes, sinks, seed,
        is_causal, scale, dropout_p, window_left, window_right, softcap);
    context->save_for_backward({query, key, value, attn_bias.value_or(Tensor()),
                                alibi_slopes.value_or(Tensor()), sinks.value_or(Tensor()),
                                seed.value_or(Tensor()), output, logsumexp});
    auto& options = context->saved_data;
    options["is_causal"] = is_causal;
    options["scale"] = scale;
    options["dropout_p"] = dropout_p;
    options["window_left"] = window_left;
    options["window_right"] = window_right;
    options["softcap"] = softcap;
    return {output, logsumexp};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto needed = needed_gradients(*context, saved);
    // As many as forward has arguments; the first is the dispatch keys.
    variable_list result(14);
    if (needed[kBias]) {
      static const auto bias_backward = find<BiasBackward>("foo::attention_bias_backward");
      result[1 + kBias] = call(bias_backward, *context, gradients, saved, saved[kBias]);
    }
    const std::array<size_t, 5> others{0, 1, 2, 4, 5};
    if (std::any_of(others.begin(), others.end(), [&](size_t input) { return needed[input]; })) {
      static const auto backward = find<Backward>("foo::attention_backward");
      auto [query, key, value, slopes, sinks] =
          call(backward, *context, gradients, saved, given(saved[kBias]));
      const std::array<Tensor, 5> found{query, key, value, slopes, sinks};
      for (size_t i = 0; i < others.size(); ++i) {
        if (needed[others[i]]) {
          result[1 + others[i]] = found[i];
        }
      }
    }
    return result;
  }
};

Outputs attention_seeded_autograd(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const OptionalTensor& attn_bias,
                                  const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                  const OptionalTensor& seed, bool is_causal,
                                  std::optional<double> scale, double dropout_p,
                                  int64_t window_left, int64_t window_right, double softcap) {
  if (requires_gradient({query, key, value, attn_bias, alibi_slopes, sinks})) {
    auto results =
        AttentionGradient::apply(keys, query, key, value, attn_bias, alibi_slopes, sinks, seed,
                                 is_causal, scale, dropout_p, window_left, window_right, softcap);
    return {results[0], results[1]};
  }
  static const auto seeded = find<AttentionSeeded>("foo::attention_seeded");
  const at::AutoDispatchBelowAutograd guard;
  return seeded.redispatch(keys & c10::after_autograd_keyset, query, key, value, attn_bias,
                           alibi_slopes, sinks, seed, is_causal, scale, dropout_p, window_left,
                           window_right, softcap);
}

Outputs attention_autograd(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                           const Tensor& value, const OptionalTensor& attn_bias,
                           const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                           bool is_causal, std::optional<double> scale, double dropout_p,
                           int64_t window_left, int64_t window_right, double softcap) {
  if (requires_gradient({query, key, value, attn_bias, alibi_slopes, sinks})) {
    // What is differentiated is the operator whose seed the backward pass can be given, too.
    static const auto seeded = find<AttentionSeeded>("foo::attention_seeded");
    return seeded.call(query, key, value, attn_bias, alibi_slopes, sinks,
                       draw_seed(query, dropout_p), is_causal, scale, dropout_p, window_left,
                       window_right, softcap);
  }
  static const auto attention = find<Attention>("foo::attention");
  const at::AutoDispatchBelowAutograd guard;
  return attention.redispatch(keys & c10::after_autograd_keyset, query, key, value, attn_bias,
                              alibi_slopes, sinks, is_causal, scale, dropout_p, window_left,
                              window_right, softcap);
}

}  // namespace

TORCH_LIBRARY_IMPL(foo, Autograd, library) {
  library.impl("attention", TORCH_FN(attention_autograd));
  library.impl("attention_seeded", TORCH_FN(attention_seeded_autograd));
}

}  // namespace foo
