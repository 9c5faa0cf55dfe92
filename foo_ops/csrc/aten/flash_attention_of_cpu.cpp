// torch's CPU flash attention, computed by foo's kernels.

#include <ATen/ops/empty_permuted.h>
#include <c10/util/Exception.h>

#include <array>
#include <string>

#include "aten/aten.h"
#include "aten/attention_operators.h"
#include "launch/registration.h"

namespace foo::aten {

namespace {

using at::Tensor;

// Gives logsumexp and gradients the layout of torch's kernels, which compiled graphs rely on.
Tensor with_heads_behind_queries(const Tensor& result) {
  constexpr std::array<int64_t, 4> order = {0, 2, 1, 3};
  const auto dimensions = at::IntArrayRef(order).slice(0, result.dim());
  Tensor ordered = at::empty_permuted(result.sizes(), dimensions, result.options());
  return ordered.strides() == result.strides() ? result : ordered.copy_(result);
}

void check_dropout(double dropout_p) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      dropout_p == 0.0,
      "scaled_dot_product_attention: dropout_p must be 0 for flash attention "
      "on the CPU, got ",
      dropout_p);
}

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   double dropout_p, bool is_causal,
                                   const OptionalTensor& attn_mask, std::optional<double> scale) {
  check_dropout(dropout_p);
  const auto [output, logsumexp] =
      attention(query, key, value, attn_mask, std::nullopt, {is_causal, scale, dropout_p});
  return {in_order_of(query, output), with_heads_behind_queries(logsumexp)};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& query,
                                            const Tensor& key, const Tensor& value,
                                            const Tensor& output, const Tensor& logsumexp,
                                            double dropout_p, bool is_causal,
                                            const OptionalTensor& attn_mask,
                                            std::optional<double> scale) {
  check_dropout(dropout_p);
  const auto found =
      attention_backward(grad_output, query, key, value, attn_mask, output, logsumexp, std::nullopt,
                         /*mask_requires_grad=*/false, {is_causal, scale, dropout_p});
  return {with_heads_behind_queries(found.query), with_heads_behind_queries(found.key),
          with_heads_behind_queries(found.value)};
}

// Suppresses the warning that a kernel is replaced: the user requested it.
class Silent final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

}  // namespace

std::vector<c10::RegistrationHandleRAII> replace_flash_attention_of_cpu() {
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const std::string name = "aten::_scaled_dot_product_flash_attention_for_cpu";
  std::vector<c10::RegistrationHandleRAII> registrations;
  registrations.push_back(hold_kernel(
      name, c10::DispatchKey::CPU, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&forward)));
  registrations.push_back(
      hold_kernel(name + "_backward", c10::DispatchKey::CPU,
                  c10::KernelFunction::makeFromUnboxedRuntimeFunction(&backward)));
  return registrations;
}

}  // namespace foo::aten
