#include "ops/attention/arguments.h"

namespace foo {

namespace {

// The names come in the order of ArgumentPlaces::Name.
constexpr const char* kArgumentNames[] = {"query",          "key",
                                          "value",          "cu_seqlens_q",
                                          "cu_seqlens_k",   "grad_output",
                                          "grad_logsumexp", "output",
                                          "logsumexp",      "attn_bias_requires_grad",
                                          "is_causal",      "scale",
                                          "dropout_p",      "window_left",
                                          "window_right",   "softcap",
                                          "max_seqlen_q",   "max_seqlen_k",
                                          "part_offset",    "attn_bias",
                                          "alibi_slopes",   "sinks",
                                          "seqused_k",      "block_table",
                                          "seed",           "dropout_heads"};
static_assert(std::size(kArgumentNames) == ArgumentPlaces::kNames);

}  // namespace

ArgumentPlaces::ArgumentPlaces(const c10::FunctionSchema& schema) {
  for (size_t name = 0; name < kNames; ++name) {
    const auto index = schema.argumentIndexWithName(kArgumentNames[name]);
    places_[name] = index.has_value() ? *index : -1;
  }
}

AttentionArguments::AttentionArguments(const ArgumentPlaces& places,
                                       c10::ArrayRef<c10::IValue> values)
    : places_(places), values_(values) {
  for (size_t i = 0; i < optionals_.size(); ++i) {
    const int64_t place = places[static_cast<ArgumentPlaces::Name>(kFirstOptional + i)];
    if (place >= 0) optionals_[i] = values[place].toOptional<at::Tensor>();
  }
}

const at::Tensor& AttentionArguments::tensor(ArgumentPlaces::Name name) const {
  return places_[name] < 0 ? kNoTensor : values_[places_[name]].toTensor();
}

AttentionInputs AttentionArguments::inputs() const {
  using Places = ArgumentPlaces;
  return {.query = tensor(Places::kQuery),
          .key = tensor(Places::kKey),
          .value = tensor(Places::kValue),
          .alibi_slopes = optional(Places::kAlibiSlopes),
          .sinks = optional(Places::kSinks),
          .attn_bias = optional(Places::kAttnBias),
          .cu_seqlens_q = tensor(Places::kCuSeqlensQ),
          .cu_seqlens_k = tensor(Places::kCuSeqlensK),
          .seqused_k = optional(Places::kSequsedK),
          .block_table = optional(Places::kBlockTable),
          .dropout_heads = optional(Places::kDropoutHeads)};
}

AttentionResults AttentionArguments::results() const {
  using Places = ArgumentPlaces;
  return {tensor(Places::kGradOutput), tensor(Places::kGradLogsumexp), tensor(Places::kOutput),
          tensor(Places::kLogsumexp)};
}

AttentionOptions AttentionArguments::options() const {
  using Places = ArgumentPlaces;
  const auto value = [&](Places::Name name) -> const c10::IValue& {
    return values_[places_[name]];
  };
  AttentionOptions options{.scale = value(Places::kScale).toOptional<double>(),
                           .dropout_p = value(Places::kDropoutP).toDouble(),
                           .window_left = value(Places::kWindowLeft).toSymInt(),
                           .window_right = value(Places::kWindowRight).toSymInt(),
                           .softcap = value(Places::kSoftcap).toDouble()};
  if (places_[Places::kIsCausal] >= 0) options.is_causal = value(Places::kIsCausal).toBool();
  if (places_[Places::kMaxSeqlenQ] >= 0) {
    options.max_seqlen_q = value(Places::kMaxSeqlenQ).toSymInt();
    options.max_seqlen_k = value(Places::kMaxSeqlenK).toSymInt();
  }
  if (places_[Places::kPartOffset] >= 0) {
    options.part_offset = value(Places::kPartOffset).toOptional<c10::SymInt>();
  }
  return options;
}

bool AttentionArguments::attn_bias_requires_grad() const {
  return values_[places_[ArgumentPlaces::kBiasRequiresGrad]].toBool();
}

}  // namespace foo
