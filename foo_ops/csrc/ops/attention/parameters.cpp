#include "ops/attention/parameters.h"

#include <ATen/ops/randint.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace foo {

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
