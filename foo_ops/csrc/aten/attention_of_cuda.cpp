// CUDA's attention operators on foo::attention: cuDNN's, flash and efficient attention. Results
// have the layouts that torch/_meta_registrations.py announces.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "aten/attention_operators.h"
#include "launch/registration.h"

namespace foo::aten {

using at::Tensor;

using ThreeGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Output, logsumexp, lengths of packed sequences (none here), longest query and key, seed, offset,
// mask for debugging.
using ScaledDotProduct = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt,
                                    c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

// Checks that raise where torch's operator would, or where foo's cannot compute the call. The name
// is the operator's, for messages.
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

// Draws one number from the device's default generator; without dropout the seed is not used.
Tensor draw_seed(const Tensor& query, double dropout_p) {
  const auto options = query.options().dtype(at::kLong);
  return dropout_p > 0 ? at::randint(std::numeric_limits<int64_t>::max(), {1}, options)
                       : at::zeros({1}, options);
}

OptionalTensor seed_if_used(const Tensor& seed, double dropout_p) {
  return dropout_p > 0 ? OptionalTensor(seed) : std::nullopt;
}

// Converts Philox's seed, for efficient and cuDNN's attention, which return seed and offset as two
// numbers.
Tensor scalar_of(const Tensor& seed) {
  return seed.squeeze(0);
}

Tensor zero_offset(const Tensor& seed) {
  return at::zeros({}, seed.options());
}

Tensor heads_first(const Tensor& tensor) {
  return tensor.transpose(1, 2);
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

// CUDA's flash attention: dense, packed sequences, and paged keys.
namespace {

using at::Tensor;
using OptionalInt = std::optional<int64_t>;

// Returns seed and offset in one tensor, as flash attention does.
Tensor flash_state(const Tensor& seed) {
  return at::cat({seed, at::zeros_like(seed)}).view(at::kUInt64);
}

OptionalTensor flash_seed(const Tensor& state, double dropout_p) {
  return seed_if_used(dropout_p > 0 ? state.view(at::kLong).slice(0, 0, 1).contiguous() : state,
                      dropout_p);
}

// Flash attention aligns a causal mask to the last key, so it becomes a window.
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

// Paged keys may have no starts: `used_k` then says how many are used.
PackedSequences packed(const char* name, const OptionalTensor& starts_q,
                       const OptionalTensor& starts_k, int64_t longest_q, int64_t longest_k,
                       const OptionalTensor& used_k = std::nullopt,
                       const OptionalTensor& block_table = std::nullopt) {
  TORCH_CHECK_VALUE(has_value(starts_k) || has_value(used_k), name,
                    ": cum_seq_k must be given if cum_seq_q is given, got None");
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

// CUDA's memory-efficient attention: dense and packed sequences.
namespace {

using at::Tensor;
using OptionalInt = std::optional<int64_t>;

// Values of custom_mask_type.
enum CustomMask : int64_t { kNoMask, kCausalFromTopLeft, kCausalFromBottomRight };

constexpr int64_t kLogsumexpAlignment = 32;

int64_t rounded_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

// Pads the rows of the logsumexp to a multiple of 32, with infinity after the last query.
Tensor padded(const Tensor& logsumexp, int64_t longest_q, bool is_wanted) {
  const int64_t length = is_wanted ? rounded_up(longest_q, kLogsumexpAlignment) : 0;
  const int64_t added = length - logsumexp.size(2);
  return at::constant_pad_nd(logsumexp, {0, added}, std::numeric_limits<double>::infinity());
}

// Copies a gradient to memory whose rows have a multiple of 16 elements.
Tensor in_aligned_rows(const Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  const int64_t last = gradient.size(-1);
  at::DimVector sizes(gradient.sizes());
  sizes.back() = rounded_up(last, 16);
  return at::empty(sizes, gradient.options()).slice(-1, 0, last).copy_(gradient);
}

// One sequence of a call: a part of a batch or of packed sequences, heads first.
struct Sequence {
  // Row of the batch, and the bounds of its queries and keys.
  int64_t batch, first_q, last_q, first_k, last_k;

  Tensor queries_of(const Tensor& tensor) const { return part(tensor, first_q, last_q); }
  Tensor keys_of(const Tensor& tensor) const { return part(tensor, first_k, last_k); }

 private:
  Tensor part(const Tensor& tensor, int64_t first, int64_t last) const {
    return heads_first(tensor.slice(0, batch, batch + 1).slice(1, first, last));
  }
};

std::vector<int64_t> numbers(const Tensor& tensor) {
  const Tensor host = tensor.cpu().to(at::kLong).contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

// Arguments of efficient attention besides query, key and value.
struct Efficient {
  const char* name;
  OptionalTensor bias, starts_q, starts_k, used_k;
  int64_t custom_mask, window;
  AttentionOptions options;

  bool has_parts() const { return has_value(starts_q) || has_value(used_k); }

  void check(const Tensor& query, const Tensor& key, const Tensor& value) const {
    check_dtypes(name, query, key, value, /*takes_float32=*/true);
    check_dimensions(name, query, key, value, 4);
    TORCH_CHECK_VALUE(custom_mask >= kNoMask && custom_mask <= kCausalFromBottomRight, name,
                      ": custom_mask_type must be 0, 1 or 2, got ", custom_mask);
    TORCH_CHECK_VALUE(has_value(starts_q) == has_value(starts_k), name,
                      ": cu_seqlens_q and cu_seqlens_k must be given together, got one of them");
    TORCH_CHECK_VALUE(!has_value(starts_q) || query.size(0) == 1, name,
                      ": query must have batch size 1 with cu_seqlens_q, got ", query.size(0));
    TORCH_CHECK_VALUE(window <= 0 || custom_mask != kNoMask, name,
                      ": window_size must be None without a causal mask, got ", window);
  }

  std::vector<Sequence> sequences(const Tensor& query, const Tensor& key) const {
    std::vector<Sequence> result;
    const auto used = has_value(used_k) ? numbers(*used_k) : std::vector<int64_t>();
    if (has_value(starts_q)) {
      const auto q = numbers(*starts_q), k = numbers(*starts_k);
      check_starts("cu_seqlens_q", q, query.size(1));
      check_starts("cu_seqlens_k", k, key.size(1));
      TORCH_CHECK_VALUE(q.size() == k.size(), name, ": cu_seqlens_k must have ", q.size(),
                        " elements as cu_seqlens_q has, got ", k.size());
      for (size_t i = 0; i + 1 < q.size(); ++i)
        result.push_back({0, q[i], q[i + 1], k[i], k[i + 1]});
    } else {
      for (int64_t i = 0; i < query.size(0); ++i) {
        result.push_back({i, 0, query.size(1), 0, key.size(1)});
      }
    }
    TORCH_CHECK_VALUE(used.empty() || used.size() == result.size(), name, ": seqlen_k must have ",
                      result.size(), " elements, got ", used.size());
    for (size_t i = 0; i < used.size(); ++i) {
      TORCH_CHECK_VALUE(used[i] >= 0 && used[i] <= result[i].last_k - result[i].first_k, name,
                        ": seqlen_k must be at most ", result[i].last_k - result[i].first_k,
                        ", got ", used[i]);
      result[i].last_k = result[i].first_k + used[i];
    }
    return result;
  }

  // Returns the options for this many queries and keys.
  AttentionOptions options_for(int64_t queries, int64_t keys) const {
    AttentionOptions result = options;
    result.is_causal = custom_mask == kCausalFromTopLeft;
    if (custom_mask == kCausalFromBottomRight) result.window_right = 0;
    if (window > 0) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          custom_mask == kCausalFromBottomRight || queries == keys, name, ": key must have length ",
          queries, " as query has on foo if window_size is given with custom_mask_type 1, got ",
          keys);
      result.window_left = window - 1;
    }
    return result;
  }

  // Returns the sequence's part of the bias, which has a row per sequence, and as many keys as the
  // longest one.
  OptionalTensor bias_of(int64_t number, const Sequence& sequence) const {
    if (!has_value(bias)) return std::nullopt;
    const int64_t row = bias->size(0) == 1 ? 0 : number;
    Tensor result = bias->slice(0, row, row + 1);
    if (has_value(starts_q)) result = result.slice(2, 0, sequence.last_q - sequence.first_q);
    return result.slice(3, 0, sequence.last_k - sequence.first_k);
  }

  OptionalTensor seed_of(int64_t number, const OptionalTensor& seed) const {
    return has_value(seed) ? OptionalTensor(*seed + number) : seed;
  }

 private:
  void check_starts(const char* argument, const std::vector<int64_t>& starts, int64_t total) const {
    TORCH_CHECK_VALUE(!starts.empty() && starts.front() == 0 && starts.back() <= total &&
                          std::is_sorted(starts.begin(), starts.end()),
                      name, ": ", argument, " must increase from 0 to at most ", total, ", got ",
                      at::IntArrayRef(starts));
  }
};

std::tuple<Tensor, Tensor> efficient_attention(const Efficient& call, const Tensor& query,
                                               const Tensor& key, const Tensor& value,
                                               const OptionalTensor& seed, int64_t longest_q) {
  if (!call.has_parts()) {
    const auto [output, logsumexp] =
        attention(heads_first(query), heads_first(key), heads_first(value), call.bias, seed,
                  call.options_for(query.size(1), key.size(1)));
    return {heads_first(output).contiguous(), logsumexp};
  }
  const auto sequences = call.sequences(query, key);
  Tensor output =
      at::zeros({query.size(0), query.size(1), query.size(2), value.size(3)}, query.options());
  Tensor logsumexp =
      at::full({static_cast<int64_t>(sequences.size()), query.size(2), longest_q},
               std::numeric_limits<double>::infinity(), query.options().dtype(at::kFloat));
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& each = sequences[i];
    const Tensor queries = each.queries_of(query), keys = each.keys_of(key);
    const auto [part, sums] =
        attention(queries, keys, each.keys_of(value), call.bias_of(i, each), call.seed_of(i, seed),
                  call.options_for(queries.size(2), keys.size(2)));
    each.queries_of(output).copy_(part);
    logsumexp.slice(0, i, i + 1).slice(2, 0, queries.size(2)).copy_(sums);
  }
  return {output, logsumexp};
}

struct EfficientGradients {
  Tensor query, key, value, bias;
};

EfficientGradients efficient_gradients(const Efficient& call, const Tensor& grad_out,
                                       const Tensor& query, const Tensor& key, const Tensor& value,
                                       const Tensor& out, const Tensor& logsumexp,
                                       const OptionalTensor& seed, bool bias_requires_grad) {
  if (!call.has_parts()) {
    const auto found = attention_backward(
        heads_first(grad_out), heads_first(query), heads_first(key), heads_first(value), call.bias,
        heads_first(out), logsumexp.slice(2, 0, query.size(1)).contiguous(), seed,
        bias_requires_grad, call.options_for(query.size(1), key.size(1)));
    return {heads_first(found.query), heads_first(found.key), heads_first(found.value), found.mask};
  }
  EfficientGradients result{at::zeros_like(query), at::zeros_like(key), at::zeros_like(value),
                            bias_requires_grad ? at::zeros_like(*call.bias) : Tensor()};
  Efficient of_gradient = call;
  of_gradient.bias = result.bias;
  const auto sequences = call.sequences(query, key);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& each = sequences[i];
    const Tensor queries = each.queries_of(query), keys = each.keys_of(key);
    const auto found = attention_backward(
        each.queries_of(grad_out), queries, keys, each.keys_of(value), call.bias_of(i, each),
        each.queries_of(out),
        logsumexp.slice(0, i, i + 1).slice(2, 0, queries.size(2)).contiguous(),
        call.seed_of(i, seed), bias_requires_grad, call.options_for(queries.size(2), keys.size(2)));
    each.queries_of(result.query).add_(found.query);
    each.keys_of(result.key).add_(found.key);
    each.keys_of(result.value).add_(found.value);
    if (bias_requires_grad) of_gradient.bias_of(i, each)->add_(found.mask);
  }
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt> efficient_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    OptionalInt max_seqlen_q, OptionalInt max_seqlen_k, double dropout_p, int64_t custom_mask_type,
    bool compute_log_sumexp, std::optional<double> scale, const OptionalTensor& seqlen_k,
    OptionalInt window_size) {
  const Efficient call{.name = "_efficient_attention_forward",
                       .bias = bias,
                       .starts_q = cu_seqlens_q,
                       .starts_k = cu_seqlens_k,
                       .used_k = seqlen_k,
                       .custom_mask = custom_mask_type,
                       .window = window_size.value_or(0),
                       .options = {.scale = scale, .dropout_p = dropout_p}};
  call.check(query, key, value);
  TORCH_CHECK_VALUE(!has_value(cu_seqlens_q) || max_seqlen_q.has_value(), call.name,
                    ": max_seqlen_q must be given if cu_seqlens_q is given, got None");
  const int64_t longest_q = has_value(cu_seqlens_q) ? *max_seqlen_q : query.size(1);
  const Tensor seed = draw_seed(query, dropout_p);
  const auto [output, logsumexp] =
      efficient_attention(call, query, key, value, seed_if_used(seed, dropout_p), longest_q);
  return {output,          padded(logsumexp, longest_q, compute_log_sumexp),
          scalar_of(seed), zero_offset(seed),
          longest_q,       max_seqlen_k.value_or(key.size(1))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& bias, const Tensor& out, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, int64_t /*max_seqlen_q*/, int64_t /*max_seqlen_k*/,
    const Tensor& logsumexp, double dropout_p, const Tensor& seed, const Tensor& /*offset*/,
    int64_t custom_mask_type, bool bias_requires_grad, std::optional<double> scale,
    OptionalInt /*num_splits_key*/, OptionalInt window_size, bool shared_storage) {
  if (!grad_out.defined()) return {};
  const Efficient call{.name = "_efficient_attention_backward",
                       .bias = bias,
                       .starts_q = cu_seqlens_q,
                       .starts_k = cu_seqlens_k,
                       .used_k = std::nullopt,
                       .custom_mask = custom_mask_type,
                       .window = window_size.value_or(0),
                       .options = {.scale = scale, .dropout_p = dropout_p}};
  call.check(query, key, value);
  const auto found = efficient_gradients(call, grad_out, query, key, value, out, logsumexp,
                                         seed_if_used(seed.view({1}), dropout_p),
                                         bias_requires_grad && has_value(bias));
  const Tensor grad_bias = in_aligned_rows(found.bias);
  if (!shared_storage) {
    return {laid_out_like(query, found.query), laid_out_like(key, found.key),
            laid_out_like(value, found.value), grad_bias};
  }
  TORCH_CHECK_VALUE(
      query.sizes() == key.sizes() && query.sizes() == value.sizes(), call.name,
      ": query, key and value must have the same sizes for shared_storage_dqdkdv, got ",
      query.sizes(), ", ", key.sizes(), " and ", value.sizes());
  const auto all = at::stack({found.query, found.key, found.value}, -3);
  return {all.select(-3, 0), all.select(-3, 1), all.select(-3, 2), grad_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> scaled_dot_product_efficient(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_bias,
    bool compute_log_sumexp, double dropout_p, bool is_causal, std::optional<double> scale) {
  constexpr const char* kName = "_scaled_dot_product_efficient_attention";
  check_dtypes(kName, query, key, value, /*takes_float32=*/true);
  check_dimensions(kName, query, key, value, 4);
  const Tensor seed = draw_seed(query, dropout_p);
  const auto [output, logsumexp] =
      attention(query, key, value, attn_bias, seed_if_used(seed, dropout_p),
                {.is_causal = is_causal, .scale = scale, .dropout_p = dropout_p});
  return {heads_first(heads_first(output).contiguous()),
          padded(logsumexp, query.size(2), compute_log_sumexp), scalar_of(seed), zero_offset(seed)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> scaled_dot_product_efficient_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& attn_bias, const Tensor& out, const Tensor& logsumexp, const Tensor& seed,
    const Tensor& /*offset*/, double dropout_p, std::array<bool, 4> needed, bool is_causal,
    std::optional<double> scale) {
  if (!grad_out.defined()) return {};
  const auto found =
      attention_backward(grad_out, query, key, value, attn_bias, out,
                         logsumexp.slice(2, 0, query.size(2)).contiguous(),
                         seed_if_used(seed.view({1}), dropout_p), needed[3] && attn_bias.defined(),
                         {.is_causal = is_causal, .scale = scale, .dropout_p = dropout_p});
  const auto with_queries_first = [](const Tensor& gradient) {
    return heads_first(heads_first(gradient).contiguous());
  };
  return {with_queries_first(found.query), with_queries_first(found.key),
          with_queries_first(found.value), in_aligned_rows(found.mask)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_efficient_attention_forward", &efficient_forward>(library);
  register_own_kernel<"aten::_efficient_attention_backward", &efficient_backward>(library);
  register_own_kernel<"aten::_scaled_dot_product_efficient_attention",
                      &scaled_dot_product_efficient>(library);
  register_own_kernel<"aten::_scaled_dot_product_efficient_attention_backward",
                      &scaled_dot_product_efficient_backward>(library);
}

}  // namespace foo::aten
