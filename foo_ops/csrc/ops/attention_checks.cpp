#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include "kernel_table.h"
#include "ops/attention.h"

namespace foo {

namespace {

constexpr int64_t kLargestHeadDim = 256;

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

void check_options(const std::optional<at::Tensor>& alibi_slopes,
                   const std::optional<at::Tensor>& sinks, const AttentionOptions& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(!alibi_slopes.has_value(),
                              "attention: alibi_slopes is not supported yet, it must be None");
  TORCH_CHECK_NOT_IMPLEMENTED(!sinks.has_value(),
                              "attention: sinks is not supported yet, it must be None");
  TORCH_CHECK_NOT_IMPLEMENTED(options.dropout_p == 0.0,
                              "attention: dropout_p is not supported yet, it must be 0.0, got ",
                              options.dropout_p);
  TORCH_CHECK_NOT_IMPLEMENTED(options.window_left == -1,
                              "attention: window_left is not supported yet, it must be -1, got ",
                              options.window_left);
  TORCH_CHECK_NOT_IMPLEMENTED(options.window_right == -1,
                              "attention: window_right is not supported yet, it must be -1, got ",
                              options.window_right);
  TORCH_CHECK_NOT_IMPLEMENTED(options.softcap == 0.0,
                              "attention: softcap is not supported yet, it must be 0.0, got ",
                              options.softcap);
}

void check_kind(const char* name, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK_VALUE(tensor.dim() == 4, "attention: ", name,
                    " must have 4 dimensions (batch, heads, length, head_dim), got ", tensor.dim());
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), "attention: ", name, " must be ",
                   dtype_name(query.scalar_type()), " as query is, got ",
                   dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.device() == query.device(), "attention: ", name, " must be on ",
                    query.device(), " as query is, got ", tensor.device());
}

void check_sizes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const auto q = query.sym_sizes();
  const auto k = key.sym_sizes();
  const auto v = value.sym_sizes();
  TORCH_CHECK_VALUE(q[3] >= 1 && q[3] <= kLargestHeadDim,
                    "attention: query must have a head dimension from 1 to ", kLargestHeadDim,
                    ", got ", q[3]);
  TORCH_CHECK_VALUE(v[3] >= 1 && v[3] <= kLargestHeadDim,
                    "attention: value must have a head dimension from 1 to ", kLargestHeadDim,
                    ", got ", v[3]);
  TORCH_CHECK_VALUE(k[0] == q[0], "attention: key must have batch size ", q[0],
                    " as query has, got ", k[0]);
  TORCH_CHECK_VALUE(k[3] == q[3], "attention: key must have head dimension ", q[3],
                    " as query has, got ", k[3]);
  TORCH_CHECK_VALUE(v[0] == q[0], "attention: value must have batch size ", q[0],
                    " as query has, got ", v[0]);
  TORCH_CHECK_VALUE(v[1] == k[1], "attention: value must have ", k[1], " heads as key has, got ",
                    v[1]);
  TORCH_CHECK_VALUE(v[2] == k[2], "attention: value must have length ", k[2], " as key has, got ",
                    v[2]);
  if (k[1] == 0) {
    TORCH_CHECK_VALUE(q[1] == 0, "attention: query must have 0 heads as key has, got ", q[1]);
  } else {
    TORCH_CHECK_VALUE(q[1] % k[1] == 0, "attention: query must have a multiple of key's ", k[1],
                      " heads, got ", q[1]);
  }
}

void check_bias(const at::Tensor& bias, const at::Tensor& query, const at::Tensor& key) {
  const auto dtype = bias.scalar_type();
  const auto query_dtype = query.scalar_type();
  const std::string allowed = query_dtype == at::kFloat
                                  ? "bool or float32"
                                  : "bool, float32 or " + dtype_name(query_dtype) + " as query is";
  TORCH_CHECK_TYPE(dtype == at::kBool || dtype == at::kFloat || dtype == query_dtype,
                   "attention: attn_bias must be ", allowed, ", got ", dtype_name(dtype));
  TORCH_CHECK_VALUE(bias.device() == query.device(), "attention: attn_bias must be on ",
                    query.device(), " as query is, got ", bias.device());
  const std::vector<c10::SymInt> target = {query.sym_size(0), query.sym_size(1), query.sym_size(2),
                                           key.sym_size(2)};
  const auto sizes = bias.sym_sizes();
  bool fits = sizes.size() <= target.size();
  for (size_t i = 1; fits && i <= sizes.size(); ++i) {
    const auto& size = sizes[sizes.size() - i];
    fits = size == 1 || size == target[target.size() - i];
  }
  TORCH_CHECK_VALUE(fits, "attention: attn_bias must have a shape that broadcasts to ",
                    c10::SymIntArrayRef(target), ", got ", sizes);
}

// What the forward pass has returned, or a gradient of that.
void check_result(const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                  c10::SymIntArrayRef sizes, const at::Tensor& query) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, "attention_backward: ", name, " must be ",
                   dtype_name(dtype), ", got ", dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.device() == query.device(), "attention_backward: ", name, " must be on ",
                    query.device(), " as query is, got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.sym_sizes() == sizes, "attention_backward: ", name, " must have shape ",
                    sizes, ", got ", tensor.sym_sizes());
}

}  // namespace

void check_attention_gradients(const at::Tensor& grad_output, const at::Tensor& grad_logsumexp,
                               const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const std::optional<at::Tensor>& attn_bias,
                               const at::Tensor& output, const at::Tensor& logsumexp) {
  check_attention(query, key, value, attn_bias, std::nullopt, std::nullopt, {0.0, -1, -1, 0.0});
  const std::vector<c10::SymInt> sizes = {query.sym_size(0), query.sym_size(1), query.sym_size(2),
                                          value.sym_size(3)};
  const c10::SymIntArrayRef rows(sizes.data(), 3);
  const auto dtype = query.scalar_type();
  const auto compute = dtype == at::kDouble ? at::kDouble : at::kFloat;
  check_result("grad_output", grad_output, dtype, sizes, query);
  check_result("output", output, dtype, sizes, query);
  check_result("grad_logsumexp", grad_logsumexp, compute, rows, query);
  check_result("logsumexp", logsumexp, compute, rows, query);
}

void check_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& attn_bias,
                     const std::optional<at::Tensor>& alibi_slopes,
                     const std::optional<at::Tensor>& sinks, const AttentionOptions& options) {
  check_options(alibi_slopes, sinks, options);
  TORCH_CHECK_TYPE(is_supported(query.scalar_type()),
                   "attention: query must be float16, bfloat16, float32 or float64, got ",
                   dtype_name(query.scalar_type()));
  check_kind("query", query, query);
  check_kind("key", key, query);
  check_kind("value", value, query);
  check_sizes(query, key, value);
  if (attn_bias.has_value()) {
    check_bias(*attn_bias, query, key);
  }
}

}  // namespace foo
