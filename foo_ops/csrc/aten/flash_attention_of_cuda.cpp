// Flash attention as torch has it for CUDA, dense, of packed sequences and of keys in pages.

#include <ATen/Functions.h>

#include <tuple>
#include <utility>

#include "aten/attention_of_cuda.h"
#include "launch/operator_counts.h"

namespace foo::aten {
namespace {

using at::Tensor;
using OptionalInt = std::optional<int64_t>;

// Seed and offset in one tensor, as flash attention returns them.
Tensor flash_state(const Tensor& seed) {
  return at::cat({seed, at::zeros_like(seed)}).view(at::kUInt64);
}

OptionalTensor flash_seed(const Tensor& state, double dropout_p) {
  return seed_if_used(dropout_p > 0 ? state.view(at::kLong).slice(0, 0, 1).contiguous() : state,
                      dropout_p);
}

// A causal mask of flash attention is aligned to the last key, and so a window.
AttentionOptions flash_options(double dropout_p, bool is_causal, std::optional<double> scale,
                               OptionalInt window_left = std::nullopt,
                               OptionalInt window_right = std::nullopt) {
  AttentionOptions options{.scale = scale, .dropout_p = dropout_p};
  options.window_left = window_left.value_or(-1);
  options.window_right = is_causal ? 0 : window_right.value_or(-1);
  return options;
}

using FlashForward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

FlashForward flash_results(const Tensor& query, Tensor output, Tensor logsumexp,
                           const Tensor& seed) {
  return {laid_out_like(query, output), std::move(logsumexp), flash_state(seed),
          at::zeros({}, query.options().dtype(at::kUInt64)), at::empty({0}, query.options())};
}

// Keys in pages may have no starts: how many of them are used says `used_k`.
PackedSequences packed(const char* name, const OptionalTensor& starts_q,
                       const OptionalTensor& starts_k, int64_t longest_q, int64_t longest_k,
                       const OptionalTensor& used_k = std::nullopt,
                       const OptionalTensor& block_table = std::nullopt) {
  TORCH_CHECK_VALUE(has_value(starts_k) || has_value(used_k), name,
                    ": cum_seq_k must be given where cum_seq_q is, got None");
  const Tensor starts =
      has_value(starts_k)
          ? *starts_k
          : at::constant_pad_nd(used_k->cumsum(0), {1, 0}).to(starts_q->scalar_type());
  return {*starts_q, starts, longest_q, longest_k, used_k, block_table};
}

constexpr const char* kFlash = "_flash_attention_forward";

FlashForward flash_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                           const OptionalTensor& cum_seq_q, const OptionalTensor& cum_seq_k,
                           int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                           bool return_debug_mask, std::optional<double> scale,
                           OptionalInt window_left, OptionalInt window_right,
                           const OptionalTensor& seqused_k, const OptionalTensor& alibi_slopes,
                           const OptionalTensor& block_table, OptionalInt /*num_splits*/) {
  check_dtypes(kFlash, query, key, value, /*takes_float32=*/false);
  check_no_debug_mask(kFlash, return_debug_mask);
  AttentionOptions options = flash_options(dropout_p, is_causal, scale, window_left, window_right);
  options.alibi_slopes = has_value(alibi_slopes) ? alibi_slopes : std::nullopt;
  const Tensor seed = draw_seed(query, dropout_p);
  if (has_value(cum_seq_q)) {
    auto [output, logsumexp] =
        attention_varlen(query, key, value,
                         packed(kFlash, cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table),
                         seed_if_used(seed, dropout_p), options);
    return flash_results(query, std::move(output), std::move(logsumexp), seed);
  }
  check_dimensions(kFlash, query, key, value, 4);
  check_none(kFlash, "seqused_k", seqused_k, " without cum_seq_q");
  check_none(kFlash, "block_table", block_table, " without cum_seq_q");
  auto [output, logsumexp] = attention(heads_first(query), heads_first(key), heads_first(value),
                                       std::nullopt, seed_if_used(seed, dropout_p), options);
  return flash_results(query, heads_first(output), std::move(logsumexp), seed);
}

Tensor flash_forward_in_place(Tensor& out, const Tensor& query, const Tensor& key,
                              const Tensor& value, const OptionalTensor& cum_seq_q,
                              const OptionalTensor& cum_seq_k, int64_t max_q, int64_t max_k,
                              double dropout_p, bool is_causal, bool return_debug_mask,
                              std::optional<double> scale, OptionalInt window_left,
                              OptionalInt window_right, const OptionalTensor& seqused_k,
                              const OptionalTensor& alibi_slopes, const OptionalTensor& block_table,
                              OptionalInt num_splits) {
  constexpr const char* kName = "_flash_attention_forward_no_dropout_inplace";
  TORCH_CHECK_VALUE(dropout_p == 0.0, kName, ": dropout_p must be 0, got ", dropout_p);
  TORCH_CHECK_VALUE(out.sizes() == query.sizes(), kName, ": out must have the sizes of query, ",
                    query.sizes(), ", got ", out.sizes());
  auto [output, logsumexp, state, unused, mask] =
      flash_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                    return_debug_mask, scale, window_left, window_right, seqused_k, alibi_slopes,
                    block_table, num_splits);
  out.copy_(output);
  return logsumexp;
}

ThreeGradients flash_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                              const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                              const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q,
                              int64_t max_k, double dropout_p, bool is_causal, const Tensor& state,
                              const Tensor& /*unused*/, std::optional<double> scale,
                              OptionalInt window_left, OptionalInt window_right) {
  if (!grad_out.defined()) return {};
  const auto options = flash_options(dropout_p, is_causal, scale, window_left, window_right);
  const auto seed = flash_seed(state, dropout_p);
  if (cum_seq_q.defined()) {
    const auto found = attention_varlen_backward(
        grad_out, query, key, value,
        packed("_flash_attention_backward", cum_seq_q, cum_seq_k, max_q, max_k), out, logsumexp,
        seed, options);
    return {laid_out_like(query, found.query), laid_out_like(key, found.key),
            laid_out_like(value, found.value)};
  }
  const auto found =
      attention_backward(heads_first(grad_out), heads_first(query), heads_first(key),
                         heads_first(value), std::nullopt, heads_first(out), logsumexp, seed,
                         /*mask_requires_grad=*/false, options);
  return {laid_out_like(query, heads_first(found.query)),
          laid_out_like(key, heads_first(found.key)),
          laid_out_like(value, heads_first(found.value))};
}

ScaledDotProduct scaled_dot_product_flash(const Tensor& query, const Tensor& key,
                                          const Tensor& value, double dropout_p, bool is_causal,
                                          bool return_debug_mask, std::optional<double> scale) {
  constexpr const char* kName = "_scaled_dot_product_flash_attention";
  check_dtypes(kName, query, key, value, /*takes_float32=*/false);
  check_dimensions(kName, query, key, value, 4);
  check_no_debug_mask(kName, return_debug_mask);
  const Tensor seed = draw_seed(query, dropout_p);
  auto [output, logsumexp] =
      attention(query, key, value, std::nullopt, seed_if_used(seed, dropout_p),
                flash_options(dropout_p, is_causal, scale));
  auto [ordered, sums, state, unused, mask] =
      flash_results(query, std::move(output), std::move(logsumexp), seed);
  return {ordered, sums, Tensor(), Tensor(), query.size(2), key.size(2), state, unused, mask};
}

ThreeGradients scaled_dot_product_flash_backward(const Tensor& grad_out, const Tensor& query,
                                                 const Tensor& key, const Tensor& value,
                                                 const Tensor& out, const Tensor& logsumexp,
                                                 const Tensor&, const Tensor&, int64_t, int64_t,
                                                 double dropout_p, bool is_causal,
                                                 const Tensor& state, const Tensor&,
                                                 std::optional<double> scale) {
  if (!grad_out.defined()) return {};
  const auto found = attention_backward(grad_out, query, key, value, std::nullopt, out, logsumexp,
                                        flash_seed(state, dropout_p), /*mask_requires_grad=*/false,
                                        flash_options(dropout_p, is_causal, scale));
  return {laid_out_like(query, found.query), laid_out_like(key, found.key),
          laid_out_like(value, found.value)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_flash_attention_forward", &flash_forward>(library);
  register_own_kernel<"aten::_flash_attention_forward_no_dropout_inplace", &flash_forward_in_place>(
      library);
  register_own_kernel<"aten::_flash_attention_backward", &flash_backward>(library);
  register_own_kernel<"aten::_scaled_dot_product_flash_attention", &scaled_dot_product_flash>(
      library);
  register_own_kernel<"aten::_scaled_dot_product_flash_attention_backward",
                      &scaled_dot_product_flash_backward>(library);
}

}  // namespace foo::aten
