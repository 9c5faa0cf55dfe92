#include "ops/attention/arguments.h"

#include <ATen/ops/randint.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "launch/kernel_table.h"
#include "launch/registration.h"
#include "launch/symbols.h"

namespace foo {

namespace {

// In the order of ArgumentPlaces::Tensor.
constexpr const char* kTensorNames[] = {
    "query",        "key",         "value",          "key_scale",   "value_scale", "cu_seqlens_q",
    "cu_seqlens_k", "grad_output", "grad_logsumexp", "output",      "logsumexp",   "attn_bias",
    "alibi_slopes", "sinks",       "seqused_k",      "block_table", "seed",        "dropout_heads"};
static_assert(std::size(kTensorNames) == ArgumentPlaces::kTensors);

// Returns the argument's index, or -1.
int64_t place_of(const c10::FunctionSchema& schema, const char* name) {
  const auto index = schema.argumentIndexWithName(name);
  return index.has_value() ? *index : -1;
}

}  // namespace

c10::SymInt batch_of(const AttentionInputs& inputs) {
  const bool is_packed = inputs.cu_seqlens_q.defined();
  return is_packed ? inputs.cu_seqlens_q.sym_size(0) - 1 : inputs.query.sym_size(0);
}

ArgumentPlaces::ArgumentPlaces(const c10::FunctionSchema& schema)
    : name_(short_name(schema.name())) {
  constexpr std::string_view kSeeded = "_seeded";
  if (name_.ends_with(kSeeded)) name_.resize(name_.size() - kSeeded.size());
  for (size_t i = 0; i < kTensors; ++i) tensors_[i] = place_of(schema, kTensorNames[i]);
  std::apply(
      [&](const auto&... options) {
        size_t i = 0;
        ((options_[i++] = place_of(schema, options.name)), ...);
      },
      kAttentionOptions);
}

AttentionArguments::AttentionArguments(const ArgumentPlaces& places,
                                       c10::ArrayRef<c10::IValue> values)
    : places_(places),
      values_(values),
      inputs_{.query = tensor(ArgumentPlaces::kQuery),
              .key = tensor(ArgumentPlaces::kKey),
              .value = tensor(ArgumentPlaces::kValue),
              .alibi_slopes = optional(ArgumentPlaces::kAlibiSlopes),
              .sinks = optional(ArgumentPlaces::kSinks),
              .attn_bias = optional(ArgumentPlaces::kAttnBias),
              .cu_seqlens_q = tensor(ArgumentPlaces::kCuSeqlensQ),
              .cu_seqlens_k = tensor(ArgumentPlaces::kCuSeqlensK),
              .seqused_k = optional(ArgumentPlaces::kSequsedK),
              .block_table = optional(ArgumentPlaces::kBlockTable),
              .key_scale = tensor(ArgumentPlaces::kKeyScale),
              .value_scale = tensor(ArgumentPlaces::kValueScale),
              .dropout_heads = optional(ArgumentPlaces::kDropoutHeads)} {
  for (size_t i = 0; i < optionals_.size(); ++i) {
    const int64_t place = places[static_cast<ArgumentPlaces::Tensor>(kFirstOptional + i)];
    if (place >= 0) optionals_[i] = values[place].toOptional<at::Tensor>();
  }
  const auto read = [&]<class Value>(const AttentionOption<Value>& option, int64_t place) {
    if (place >= 0) options_.*option.member = values[place].to<Value>();
  };
  std::apply(
      [&](const auto&... each) {
        size_t i = 0;
        (read(each, places.option(i++)), ...);
      },
      kAttentionOptions);
}

const at::Tensor& AttentionArguments::tensor(ArgumentPlaces::Tensor name) const {
  return places_.has(name) ? values_[places_[name]].toTensor() : kNoTensor;
}

AttentionResults AttentionArguments::results() const {
  using Places = ArgumentPlaces;
  return {tensor(Places::kGradOutput), tensor(Places::kGradLogsumexp), tensor(Places::kOutput),
          tensor(Places::kLogsumexp)};
}

namespace {

// Checks arguments; `name` is the operator's name in messages.
struct Checker {
  const char* name;
  const at::Tensor& query;

  void check_device(const char* argument, const at::Tensor& tensor) const {
    TORCH_CHECK_VALUE(tensor.device() == query.device(), name, ": ", argument, " must be on ",
                      query.device(), " as query is, got ", tensor.device());
  }

  void check_tensor(const char* argument, const at::Tensor& tensor) const {
    TORCH_CHECK_TYPE(tensor.defined(), name, ": ", argument, " must be a Tensor, got None");
  }

  void check_query() const {
    check_tensor("query", query);
    const auto dtype = query.scalar_type();
    TORCH_CHECK_TYPE(
        dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
        name, ": query must be float16, bfloat16, float32 or float64, got ", dtype_name(dtype));
  }

  // Checks query, key or value.
  void check_kind(const char* argument, const at::Tensor& tensor, int64_t dimensions,
                  const char* shape) const {
    check_tensor(argument, tensor);
    TORCH_CHECK_VALUE(tensor.dim() == dimensions, name, ": ", argument, " must have ", dimensions,
                      " dimensions ", shape, ", got ", tensor.dim());
    TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), name, ": ", argument, " must be ",
                     dtype_name(query.scalar_type()), " as query is, got ",
                     dtype_name(tensor.scalar_type()));
    check_device(argument, tensor);
  }

  void check_head_dim(const char* argument, const c10::SymInt& size) const {
    TORCH_CHECK_VALUE(holds(size.sym_ge(1)), name, ": ", argument,
                      " must have a head dimension of at least 1, got ", size);
  }

  void check_same(const char* argument, const char* what, const c10::SymInt& size,
                  const c10::SymInt& expected, const char* as) const {
    TORCH_CHECK_VALUE(holds(size.sym_eq(expected)), name, ": ", argument, " must have ", what, " ",
                      expected, " as ", as, " has, got ", size);
  }

  // Like check_same, for counts.
  void check_count(const char* argument, const char* what, const c10::SymInt& size,
                   const c10::SymInt& expected, const char* as) const {
    TORCH_CHECK_VALUE(holds(size.sym_eq(expected)), name, ": ", argument, " must have ", expected,
                      " ", what, " as ", as, " has, got ", size);
  }

  void check_groups(const c10::SymInt& heads, const c10::SymInt& key_heads) const {
    if (is_known(key_heads.sym_eq(0))) {
      TORCH_CHECK_VALUE(holds(heads.sym_eq(0)), name, ": query must have 0 heads as key has, got ",
                        heads);
    } else {
      TORCH_CHECK_VALUE(holds((heads % key_heads).sym_eq(0)), name,
                        ": query must have a multiple of key's ", key_heads, " heads, got ", heads);
    }
  }

  // Requires float32 or query's dtype for a tensor that is added to scores.
  void check_number(const char* argument, const at::Tensor& tensor, const char* also) const {
    const auto dtype = tensor.scalar_type();
    const auto query_dtype = query.scalar_type();
    const bool fits = dtype == at::kFloat || dtype == query_dtype;
    std::string allowed = std::string(also) + "float32";
    if (query_dtype != at::kFloat) {
      allowed += " or " + dtype_name(query_dtype) + " as query is";
    }
    TORCH_CHECK_TYPE(fits || (*also != '\0' && dtype == at::kBool), name, ": ", argument,
                     " must be ", allowed, ", got ", dtype_name(dtype));
    check_device(argument, tensor);
  }

  // Checks a tensor of one number per head, optionally also per row of the batch.
  void check_of_heads(const char* argument, const std::optional<at::Tensor>& tensor,
                      const c10::SymInt& batch, const c10::SymInt& heads) const {
    if (!tensor.has_value()) {
      return;
    }
    check_number(argument, *tensor, "");
    const auto sizes = tensor->sym_sizes();
    const c10::SymInt expected[] = {batch, heads};
    const bool fits = have_sizes(sizes, {heads}) || have_sizes(sizes, expected);
    TORCH_CHECK_VALUE(fits, name, ": ", argument, " must have shape [Hq] = [", heads,
                      "] or [B, Hq] = [", batch, ", ", heads, "], got ", sizes);
  }

  void check_options(const AttentionOptions& options) const {
    TORCH_CHECK_VALUE(options.dropout_p >= 0.0 && options.dropout_p < 1.0, name,
                      ": dropout_p must be at least 0 and less than 1, got ", options.dropout_p);
    check_scores(name, options);
  }

  // Checks cu_seqlens, seqused_k or block_table.
  void check_integers(const char* argument, const at::Tensor& tensor, int64_t dimensions,
                      const char* shape) const {
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, name, ": ", argument, " must be int32, got ",
                     dtype_name(tensor.scalar_type()));
    check_device(argument, tensor);
    TORCH_CHECK_VALUE(tensor.dim() == dimensions, name, ": ", argument, " must have ", dimensions,
                      dimensions == 1 ? " dimension" : " dimensions", shape, ", got ",
                      tensor.dim());
  }
};

void check_bias(const Checker& checker, const at::Tensor& bias, const at::Tensor& query,
                const at::Tensor& key) {
  checker.check_number("attn_bias", bias,
                       query.scalar_type() == at::kFloat ? "bool or " : "bool, ");
  const std::vector<c10::SymInt> target = {query.sym_size(0), query.sym_size(1), query.sym_size(2),
                                           key.sym_size(2)};
  const auto sizes = bias.sym_sizes();
  bool fits = sizes.size() <= target.size();
  for (size_t i = 1; fits && i <= sizes.size(); ++i) {
    const auto& size = sizes[sizes.size() - i];
    fits = holds(size.sym_eq(target[target.size() - i]).sym_or(size.sym_eq(1)));
  }
  TORCH_CHECK_VALUE(fits, "attention: attn_bias must have a shape that broadcasts to ",
                    c10::SymIntArrayRef(target), ", got ", sizes);
}

void check_packed_sizes(const Checker& checker, const AttentionInputs& inputs) {
  const auto q = inputs.query.sym_sizes();
  const auto k = inputs.key.sym_sizes();
  const auto v = inputs.value.sym_sizes();
  const bool paged = inputs.block_table.has_value();
  const size_t head = paged ? 2 : 1;
  checker.check_head_dim("query", q[2]);
  checker.check_head_dim("value", v[head + 1]);
  checker.check_same("key", "head dimension", k[head + 1], q[2], "query");
  checker.check_count("value", "heads", v[head], k[head], "key");
  if (paged) {
    checker.check_count("value", "blocks", v[0], k[0], "key");
    checker.check_same("value", "block size", v[1], k[1], "key");
    TORCH_CHECK_VALUE(holds(k[1].sym_ge(1)), checker.name,
                      ": key must have a block size of at least 1, got ", k[1]);
  } else {
    checker.check_same("value", "length", v[0], k[0], "key");
  }
  checker.check_groups(q[1], k[head]);
}

void check_sequences(const Checker& checker, const AttentionInputs& inputs) {
  checker.check_integers("cu_seqlens_q", inputs.cu_seqlens_q, 1, "");
  const auto count = inputs.cu_seqlens_q.sym_size(0);
  TORCH_CHECK_VALUE(holds(count.sym_ge(1)), checker.name,
                    ": cu_seqlens_q must have at least 1 element, got ", count);
  checker.check_integers("cu_seqlens_k", inputs.cu_seqlens_k, 1, "");
  checker.check_count("cu_seqlens_k", "elements", inputs.cu_seqlens_k.sym_size(0), count,
                      "cu_seqlens_q");
  if (inputs.seqused_k.has_value()) {
    checker.check_integers("seqused_k", *inputs.seqused_k, 1, "");
    TORCH_CHECK_VALUE(holds(inputs.seqused_k->sym_size(0).sym_eq(count - 1)), checker.name,
                      ": seqused_k must have ", count - 1, " elements, one for each sequence, got ",
                      inputs.seqused_k->sym_size(0));
  }
  if (inputs.block_table.has_value()) {
    checker.check_integers("block_table", *inputs.block_table, 2, " (batch, max_blocks)");
    TORCH_CHECK_VALUE(holds(inputs.block_table->sym_size(0).sym_eq(count - 1)), checker.name,
                      ": block_table must have ", count - 1, " rows, one for each sequence, got ",
                      inputs.block_table->sym_size(0));
  }
}

}  // namespace

void check_dense(const char* name, const AttentionInputs& inputs) {
  const Checker checker{name, inputs.query};
  constexpr auto kShape = "(batch, heads, length, head_dim)";
  checker.check_query();
  checker.check_kind("query", inputs.query, 4, kShape);
  checker.check_kind("key", inputs.key, 4, kShape);
  checker.check_kind("value", inputs.value, 4, kShape);
  const auto q = inputs.query.sym_sizes();
  const auto k = inputs.key.sym_sizes();
  const auto v = inputs.value.sym_sizes();
  checker.check_head_dim("query", q[3]);
  checker.check_head_dim("value", v[3]);
  checker.check_same("key", "batch size", k[0], q[0], "query");
  checker.check_same("key", "head dimension", k[3], q[3], "query");
  checker.check_same("value", "batch size", v[0], q[0], "query");
  checker.check_count("value", "heads", v[1], k[1], "key");
  checker.check_same("value", "length", v[2], k[2], "key");
  checker.check_groups(q[1], k[1]);
}

void check_packed(const char* name, const AttentionInputs& inputs) {
  const Checker checker{name, inputs.query};
  const bool paged = inputs.block_table.has_value();
  const int64_t dimensions = paged ? 4 : 3;
  const char* const shape =
      paged ? "(num_blocks, block_size, heads, head_dim)" : "(total, heads, head_dim)";
  checker.check_query();
  checker.check_kind("query", inputs.query, 3, "(total, heads, head_dim)");
  checker.check_kind("key", inputs.key, dimensions, shape);
  checker.check_kind("value", inputs.value, dimensions, shape);
  check_packed_sizes(checker, inputs);
  check_sequences(checker, inputs);
}

void check_scores(const char* name, const AttentionOptions& options) {
  TORCH_CHECK_VALUE(holds(options.window_left.sym_ge(-1)), name,
                    ": window_left must be at least 0, or -1 for no bound, got ",
                    options.window_left);
  TORCH_CHECK_VALUE(holds(options.window_right.sym_ge(-1)), name,
                    ": window_right must be at least 0, or -1 for no bound, got ",
                    options.window_right);
  TORCH_CHECK_VALUE(options.softcap >= 0.0 && std::isfinite(options.softcap), name,
                    ": softcap must be positive and finite, or 0 for none, got ", options.softcap);
}

void check_attention_results(const char* name, const at::Tensor& grad_output,
                             const at::Tensor& grad_logsumexp, const at::Tensor& query,
                             const at::Tensor& value, const at::Tensor& output,
                             const at::Tensor& logsumexp) {
  const auto check = [&](const char* argument, const at::Tensor& tensor, at::ScalarType dtype,
                         c10::SymIntArrayRef sizes) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, ": ", argument, " must be ",
                     dtype_name(dtype), ", got ", dtype_name(tensor.scalar_type()));
    TORCH_CHECK_VALUE(tensor.device() == query.device(), name, ": ", argument, " must be on ",
                      query.device(), " as query is, got ", tensor.device());
    TORCH_CHECK_VALUE(have_sizes(tensor.sym_sizes(), sizes), name, ": ", argument,
                      " must have shape ", sizes, ", got ", tensor.sym_sizes());
  };
  const auto dtype = query.scalar_type();
  const auto compute = dtype == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<c10::SymInt> sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  std::vector<c10::SymInt> rows(sizes.begin(), sizes.end() - 1);
  if (rows.size() == 2) {
    // Packed tensors are (total, heads, value_dim), but rows are (heads, total).
    std::swap(rows[0], rows[1]);
  }
  check("grad_output", grad_output, dtype, sizes);
  check("output", output, dtype, sizes);
  check("grad_logsumexp", grad_logsumexp, compute, rows);
  check("logsumexp", logsumexp, compute, rows);
}

namespace {

void check_inputs(const AttentionInputs& inputs, const AttentionOptions& options, bool is_packed) {
  const Checker checker{is_packed ? "attention_varlen" : "attention", inputs.query};
  if (is_packed) {
    check_packed(checker.name, inputs);
  } else {
    check_dense(checker.name, inputs);
    if (inputs.attn_bias.has_value()) {
      check_bias(checker, *inputs.attn_bias, inputs.query, inputs.key);
    }
  }
  const auto batch = batch_of(inputs), heads = inputs.query.sym_size(1);
  checker.check_of_heads("alibi_slopes", inputs.alibi_slopes, batch, heads);
  checker.check_of_heads("sinks", inputs.sinks, batch, heads);
  checker.check_options(options);
}

// Only a bias of floating-point numbers has a gradient.
void check_bias_gradient(const std::optional<at::Tensor>& attn_bias) {
  TORCH_CHECK_VALUE(
      attn_bias.has_value(),
      "attention_backward: attn_bias must be given if attn_bias_requires_grad, got None");
  TORCH_CHECK_TYPE(
      at::isFloatingType(attn_bias->scalar_type()),
      "attention_backward: attn_bias must be floating-point if attn_bias_requires_grad, got ",
      dtype_name(attn_bias->scalar_type()));
}

// A seed must be given exactly if there is dropout.
void check_seed(const char* name, const at::Tensor& query, const std::optional<at::Tensor>& seed,
                double dropout_p) {
  TORCH_CHECK_VALUE(seed.has_value() == (dropout_p > 0.0), name,
                    ": seed must be given if dropout_p is not 0, and only then, got ",
                    seed.has_value() ? "one" : "None", " with dropout_p ", dropout_p);
  if (seed.has_value()) {
    TORCH_CHECK_VALUE(seed->device() == query.device(), name, ": seed must be on ", query.device(),
                      " as query is, got ", seed->device());
    TORCH_CHECK_TYPE(seed->scalar_type() == at::kLong, name, ": seed must be int64, got ",
                     dtype_name(seed->scalar_type()));
    TORCH_CHECK_VALUE(holds(seed->sym_numel().sym_eq(1)), name, ": seed must have 1 element, got ",
                      seed->sym_numel());
  }
}

void check_dropout_heads(const char* name, const at::Tensor& query,
                         const std::optional<at::Tensor>& dropout_heads, const c10::SymInt& batch,
                         const c10::SymInt& heads) {
  if (!dropout_heads.has_value()) {
    return;
  }
  const auto sizes = dropout_heads->sym_sizes();
  TORCH_CHECK_VALUE(dropout_heads->device() == query.device(), name, ": dropout_heads must be on ",
                    query.device(), " as query is, got ", dropout_heads->device());
  TORCH_CHECK_TYPE(dropout_heads->scalar_type() == at::kLong, name,
                   ": dropout_heads must be int64, got ", dtype_name(dropout_heads->scalar_type()));
  const c10::SymInt expected[] = {batch, heads};
  TORCH_CHECK_VALUE(have_sizes(sizes, expected), name,
                    ": dropout_heads must have shape [B, Hq] = [", batch, ", ", heads, "], got ",
                    sizes);
}

}  // namespace

void check_attention(const AttentionArguments& arguments) {
  using Places = ArgumentPlaces;
  const auto& inputs = arguments.inputs();
  const auto& options = arguments.options();
  if (arguments.has(Places::kKeyScale)) {
    check_attention_int8_cache(inputs, options);
    return;
  }
  const bool is_packed = arguments.has(Places::kCuSeqlensQ);
  check_inputs(inputs, options, is_packed);
  if (arguments.has(Places::kGradOutput)) {
    const auto results = arguments.results();
    check_attention_results(arguments.name(), results.grad_output, results.grad_logsumexp,
                            inputs.query, inputs.value, results.output, results.logsumexp);
  }
  if (arguments.has(Places::kSeed)) {
    check_seed(arguments.name(), inputs.query, arguments.seed(), options.dropout_p);
    check_dropout_heads(arguments.name(), inputs.query, inputs.dropout_heads, batch_of(inputs),
                        inputs.query.sym_size(1));
  }
  if (options.attn_bias_requires_grad) check_bias_gradient(inputs.attn_bias);
}

void check_attention_dropout_mask(const at::Tensor& seed, c10::SymIntArrayRef shape,
                                  double dropout_p, const std::optional<at::Tensor>& dropout_heads,
                                  at::ScalarType dtype) {
  constexpr const char* kName = "attention_dropout_mask";
  TORCH_CHECK_VALUE(shape.size() == 4, kName, ": shape must have 4 dimensions, got ", shape.size());
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, kName,
                   ": dtype must be float32 or float64, got ", dtype_name(dtype));
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p < 1.0, kName,
                    ": dropout_p must be at least 0 and less than 1, got ", dropout_p);
  check_seed(kName, seed, seed, dropout_p);
  check_dropout_heads(kName, seed, dropout_heads, shape[0], shape[1]);
}

namespace {

// Makes an operand of numbers per head, (Hq,) or (B, Hq).
Operand operand_of_heads(const at::Tensor& tensor) {
  Operand operand(tensor);
  if (tensor.dim() == 1) {
    operand.strides[1] = std::exchange(operand.strides[0], 0);
  }
  return operand;
}

}  // namespace

void set_options(Parameters& parameters, Extras& extras, const AttentionInputs& inputs,
                 const AttentionOptions& options, const std::optional<at::Tensor>& seed) {
  const auto type = compute_type(inputs.query);
  parameters.scale =
      options.scale.value_or(1.0 / std::sqrt(static_cast<double>(parameters.head_dim)));
  parameters.softcap = options.softcap;
  parameters.is_part = options.part_offset.has_value();
  if (inputs.alibi_slopes.has_value()) {
    extras.alibi_slopes = inputs.alibi_slopes->to(type);
    parameters.has_alibi_slopes = true;
    parameters.alibi_slopes = operand_of_heads(extras.alibi_slopes);
  }
  if (inputs.sinks.has_value()) {
    extras.sinks = inputs.sinks->to(type);
    parameters.has_sinks = true;
    parameters.sinks = operand_of_heads(extras.sinks);
  }
  // A factor that is not positive would make the largest product the smallest score.
  parameters.modifies = parameters.softcap > 0.0 || parameters.bias_kind != kNone ||
                        parameters.has_alibi_slopes ||
                        !(parameters.scale > 0.0 && std::isfinite(parameters.scale));
  parameters.factor = parameters.modifies ? kLog2E : kLog2E * parameters.scale;
  parameters.dropout_scale = 1.0 / (1.0 - options.dropout_p);
  if (options.dropout_p > 0.0) {
    // A weight is kept if its 32 random bits are at least this.
    const double threshold = std::round(options.dropout_p * 4294967296.0);
    parameters.dropout_threshold =
        std::clamp<int64_t>(static_cast<int64_t>(threshold), 1, (int64_t{1} << 32) - 1);
    parameters.seed = *seed->const_data_ptr<int64_t>();
    if (inputs.dropout_heads.has_value()) {
      parameters.has_dropout_heads = true;
      parameters.dropout_heads = Operand(*inputs.dropout_heads);
    }
  }
}

std::optional<at::Tensor> seed_of(const AttentionArguments& arguments,
                                  const AttentionOptions& options) {
  if (arguments.has(ArgumentPlaces::kSeed)) return arguments.seed();
  if (options.dropout_p <= 0.0) return std::nullopt;
  return draw_seed(arguments.inputs().query);
}

at::Tensor draw_seed(const at::Tensor& query) {
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, query.options().dtype(at::kLong));
}

}  // namespace foo
