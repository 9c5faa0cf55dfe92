// cuDNN's attention on foo::attention, and what it shares with flash and efficient attention. The
// results have the layouts that torch/_meta_registrations.py announces.

#include "aten/attention_of_cuda.h"

#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <utility>

#include "launch/operator_counts.h"

namespace foo::aten {

using at::Tensor;

void check_dtypes(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                  bool takes_float32) {
  const auto dtype = query.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kHalf || dtype == at::kBFloat16 || (takes_float32 && dtype == at::kFloat), name,
      ": query must be of dtype ", takes_float32 ? "float32, " : "",
      "float16 or bfloat16 as on CUDA, got ", dtype);
  for (const auto& [argument, tensor] : {std::pair("key", &key), std::pair("value", &value)}) {
    TORCH_CHECK_TYPE(tensor->scalar_type() == dtype, name, ": ", argument, " must be of dtype ",
                     dtype, " as query is, got ", tensor->scalar_type());
  }
}

void check_dimensions(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                      int64_t expected) {
  for (const auto& [argument, tensor] :
       {std::pair("query", &query), std::pair("key", &key), std::pair("value", &value)}) {
    TORCH_CHECK_VALUE(tensor->dim() == expected, name, ": ", argument, " must have ", expected,
                      " dimensions, got ", tensor->dim());
  }
}

void check_no_debug_mask(const char* name, bool return_debug_mask) {
  TORCH_CHECK_NOT_IMPLEMENTED(!return_debug_mask, name,
                              ": return_debug_mask must be False on foo, got True");
}

void check_none(const char* name, const char* argument, const OptionalTensor& tensor,
                const char* why) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_value(tensor), name, ": ", argument, " must be None on foo", why,
                              ", got a tensor");
}

Tensor draw_seed(const Tensor& query, double dropout_p) {
  const auto options = query.options().dtype(at::kLong);
  return dropout_p > 0 ? at::randint(std::numeric_limits<int64_t>::max(), {1}, options)
                       : at::zeros({1}, options);
}

OptionalTensor seed_if_used(const Tensor& seed, double dropout_p) {
  return dropout_p > 0 ? OptionalTensor(seed) : std::nullopt;
}

Tensor scalar_of(const Tensor& seed) {
  return seed.squeeze(0);
}

Tensor zero_offset(const Tensor& seed) {
  return at::zeros({}, seed.options());
}

namespace {

ScaledDotProduct cudnn_attention(const char* name, const Tensor& query, const Tensor& key,
                                 const Tensor& value, const OptionalTensor& attn_bias,
                                 double dropout_p, bool is_causal, bool return_debug_mask,
                                 std::optional<double> scale) {
  check_dtypes(name, query, key, value, /*takes_float32=*/false);
  check_dimensions(name, query, key, value, 4);
  check_no_debug_mask(name, return_debug_mask);
  const Tensor seed = draw_seed(query, dropout_p);
  auto [output, logsumexp] =
      attention(query, key, value, attn_bias, seed_if_used(seed, dropout_p),
                {.is_causal = is_causal, .scale = scale, .dropout_p = dropout_p});
  return {in_order_of(query, std::move(output)),
          logsumexp.unsqueeze(-1),
          Tensor(),
          Tensor(),
          query.size(2),
          key.size(2),
          scalar_of(seed),
          zero_offset(seed),
          Tensor()};
}

ScaledDotProduct scaled_dot_product_cudnn(const Tensor& query, const Tensor& key,
                                          const Tensor& value, const OptionalTensor& attn_bias,
                                          bool /*compute_log_sumexp*/, double dropout_p,
                                          bool is_causal, bool return_debug_mask,
                                          std::optional<double> scale) {
  return cudnn_attention("_scaled_dot_product_cudnn_attention", query, key, value, attn_bias,
                         dropout_p, is_causal, return_debug_mask, scale);
}

ScaledDotProduct cudnn_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& attn_bias, const OptionalTensor& cum_seq_q,
                               const OptionalTensor& cum_seq_k, int64_t /*max_q*/,
                               int64_t /*max_k*/, bool /*compute_log_sumexp*/, double dropout_p,
                               bool is_causal, bool return_debug_mask,
                               std::optional<double> scale) {
  constexpr const char* kName = "_cudnn_attention_forward";
  constexpr const char* kAdvice = " (use torch.nn.attention.varlen)";
  check_none(kName, "cum_seq_q", cum_seq_q, kAdvice);
  check_none(kName, "cum_seq_k", cum_seq_k, kAdvice);
  return cudnn_attention(kName, query, key, value, attn_bias, dropout_p, is_causal,
                         return_debug_mask, scale);
}

ThreeGradients cudnn_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                              const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                              const Tensor& seed, const Tensor& /*offset*/, const Tensor& attn_bias,
                              const Tensor&, const Tensor&, int64_t, int64_t, double dropout_p,
                              bool is_causal, std::optional<double> scale) {
  if (!grad_out.defined()) return {};
  const auto found = attention_backward(
      grad_out, query, key, value, attn_bias, out, logsumexp.squeeze(-1).contiguous(),
      seed_if_used(seed.view({1}), dropout_p), /*mask_requires_grad=*/false,
      {.is_causal = is_causal, .scale = scale, .dropout_p = dropout_p});
  return {laid_out_like(query, found.query), laid_out_like(key, found.key),
          laid_out_like(value, found.value)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_scaled_dot_product_cudnn_attention", &scaled_dot_product_cudnn>(
      library);
  register_own_kernel<"aten::_scaled_dot_product_cudnn_attention_backward", &cudnn_backward>(
      library);
  register_own_kernel<"aten::_cudnn_attention_forward", &cudnn_forward>(library);
  register_own_kernel<"aten::_cudnn_attention_backward", &cudnn_backward>(library);
}

}  // namespace foo::aten
