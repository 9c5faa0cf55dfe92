// torch.nn.functional.scaled_dot_product_attention on foo: foo::attention_seeded and its backward
// operator, under the names that torch gives to a device's own kernels.

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>

#include <array>
#include <limits>
#include <tuple>

#include "aten/attention_operators.h"
#include "launch/autograd.h"
#include "launch/registration.h"
#include "launch/symbols.h"

namespace foo::aten {
namespace {

using at::Tensor;

// Whether the kernels take this tensor, which must have four dimensions. Nested tensors go to
// torch's formula.
bool is_supported(const Tensor& tensor, at::ScalarType dtype) {
  return !tensor.unsafeGetTensorImpl()->is_nested() && tensor.dim() == 4 &&
         tensor.scalar_type() == dtype && is_known(tensor.sym_size(3).sym_ge(1));
}

bool is_supported_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

bool have_supported_shapes(const Tensor& query, const Tensor& key, const Tensor& value,
                           bool enable_gqa) {
  const auto q = query.sym_sizes(), k = key.sym_sizes(), v = value.sym_sizes();
  const auto same = [](const c10::SymInt& one, const c10::SymInt& other) {
    return is_known(one.sym_eq(other));
  };
  const bool are_heads_grouped = enable_gqa && is_known(k[1].sym_gt(0)) && same(q[1] % k[1], 0);
  return same(q[0], k[0]) && same(k[0], v[0]) && (same(q[1], k[1]) || are_heads_grouped) &&
         same(k[1], v[1]) && same(k[2], v[2]) && same(q[3], k[3]);
}

bool is_supported_mask(const Tensor& mask, const Tensor& query, const Tensor& key) {
  const auto dtype = mask.scalar_type();
  const std::array<c10::SymInt, 4> scores = {query.sym_size(0), query.sym_size(1),
                                             query.sym_size(2), key.sym_size(2)};
  return (dtype == at::kBool || dtype == at::kFloat || dtype == query.scalar_type()) &&
         at::is_expandable_to(mask.sym_sizes(), scores);
}

// Draws an integer from the device's default generator; without dropout the seed is not used.
Tensor draw_seed(const Tensor& query, double dropout_p) {
  const auto options = query.options().dtype(at::kLong);
  return dropout_p > 0 ? at::randint(std::numeric_limits<int64_t>::max(), {1}, options).squeeze(0)
                       : at::empty({}, options);
}

OptionalTensor seed_argument(const Tensor& seed, double dropout_p) {
  return dropout_p > 0 ? OptionalTensor(seed.view({1})) : std::nullopt;
}

// Output, logsumexp, lengths of packed sequences (none here), longest query and key, seed and
// offset of the random numbers, mask for debugging (none here).
using FusedAttention =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

FusedAttention fused_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& attn_bias, double dropout_p, bool is_causal,
                               bool /*return_debug_mask*/, std::optional<double> scale) {
  const Tensor seed = draw_seed(query, dropout_p);
  auto [output, logsumexp] = attention(query, key, value, attn_bias, seed_argument(seed, dropout_p),
                                       {is_causal, scale, dropout_p});
  return {in_order_of(query, std::move(output)),
          std::move(logsumexp),
          Tensor(),
          Tensor(),
          query.size(2),
          key.size(2),
          seed,
          at::empty({}, seed.options()),
          Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_attention_backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& attn_bias, std::array<bool, 4> needed, const Tensor& output,
    const Tensor& logsumexp, const Tensor&, const Tensor&, int64_t, int64_t, double dropout_p,
    bool is_causal, const Tensor& seed, const Tensor&, std::optional<double> scale) {
  if (!grad_output.defined()) return {};
  const auto found =
      attention_backward(grad_output, query, key, value, attn_bias, output, logsumexp,
                         seed_argument(seed, dropout_p), needed[3], {is_causal, scale, dropout_p});
  return {in_order_of(query, found.query), in_order_of(key, found.key),
          in_order_of(value, found.value), found.mask};
}

// torch has a formula only for the gradients of the first operator. foo's operators that compute
// both can be differentiated, in both modes.
class Differentiable final : public c10::OperatorKernel {
 public:
  Differentiable(c10::SafeKernelFunction of_torch, c10::KernelFunction ours, bool has_gradients)
      : of_torch_(std::move(of_torch)), ours_(std::move(ours)), has_gradients_(has_gradients) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    if (has_tangent(op, *stack) || (!has_gradients_ && needs_gradient(op, *stack))) {
      ours_.callBoxed(op, keys, stack);
    } else {
      of_torch_.callBoxed(op, keys, stack);
    }
  }

 private:
  c10::SafeKernelFunction of_torch_;
  c10::KernelFunction ours_;
  bool has_gradients_;
};

constexpr const char* kForward = "aten::_scaled_dot_product_fused_attention_overrideable";
constexpr const char* kBackward = "aten::_scaled_dot_product_fused_attention_overrideable_backward";

void make_differentiable(const char* name, c10::KernelFunction ours, bool has_gradients) {
  constexpr auto kKey = c10::DispatchKey::AutogradPrivateUse1;
  auto of_torch = find_operator(name).getComputedKernelForDispatchKey(kKey);
  register_kernel(name, kKey,
                  c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Differentiable>(
                      std::move(of_torch), std::move(ours), has_gradients)));
}

const bool are_differentiable = [] {
  make_differentiable(kForward,
                      c10::KernelFunction::makeFromUnboxedRuntimeFunction(&fused_attention), true);
  make_differentiable(
      kBackward, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&fused_attention_backward),
      false);
  return true;
}();

}  // namespace

int64_t choose_attention_backend(const Tensor& query, const Tensor& key, const Tensor& value,
                                 const OptionalTensor& mask, double dropout_p, bool,
                                 std::optional<double>, bool enable_gqa) {
  const auto dtype = query.scalar_type();
  const bool is_fused = at::globalContext().userEnabledOverrideableSDP() &&
                        is_supported_dtype(dtype) && is_supported(query, dtype) &&
                        is_supported(key, dtype) && is_supported(value, dtype) &&
                        have_supported_shapes(query, key, value, enable_gqa) && dropout_p < 1.0 &&
                        (!has_value(mask) || is_supported_mask(*mask, query, key));
  TORCH_CHECK(is_fused || at::globalContext().userEnabledMathSDP(),
              "No viable backend for scaled_dot_product_attention was found: enable "
              "SDPBackend.MATH on foo, or SDPBackend.OVERRIDEABLE for four dimensions and a head "
              "dimension of at least 1");
  return static_cast<int64_t>(is_fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_fused_sdp_choice", &choose_attention_backend>(library);
  register_own_kernel<"aten::_scaled_dot_product_fused_attention_overrideable", &fused_attention>(
      library);
  register_own_kernel<"aten::_scaled_dot_product_fused_attention_overrideable_backward",
                      &fused_attention_backward>(library);
}

}  // namespace foo::aten

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &foo::aten::choose_attention_backend)
}
