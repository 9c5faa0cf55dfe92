#include "aten/refused_operators.h"

#include <torch/library.h>

#include <string_view>
#include <utility>

#include "launch/operator_counts.h"

namespace foo::aten {
namespace {

// Keyed by prefixes of names; the first match counts.
constexpr std::pair<std::string_view, std::string_view> kInstead[] = {
    {"_conv_depthwise2d", "torch.nn.functional.conv2d with groups"},
    {"_convert_weight_to_int4pack_for_cpu", "torch.ops.aten._convert_weight_to_int4pack"},
    {"_cslt_", "torch.nn.functional.linear of the dense weight"},
    {"_cudnn_ctc_loss", "torch.nn.functional.ctc_loss"},
    {"_cudnn_init_dropout_state", "torch.nn.LSTM or torch.nn.GRU"},
    {"_cudnn_rnn", "torch.nn.LSTM or torch.nn.GRU"},
    {"_fill_mem_eff_dropout_mask_", "torch.Tensor.bernoulli_"},
    {"_flash_attention_forward", "torch.nn.functional.scaled_dot_product_attention in bfloat16"},
    {"_mixed_dtypes_linear", "foo_ops.linear_int8 or foo_ops.linear_int4"},
    {"_philox_", "a torch.Generator of the device"},
    {"_scaled_dot_product_cudnn_attention", "torch.nn.functional.scaled_dot_product_attention"},
    {"_scaled_dot_product_efficient_attention", "torch.nn.functional.scaled_dot_product_attention"},
    {"_scaled_dot_product_flash_attention",
     "torch.nn.functional.scaled_dot_product_attention in bfloat16"},
    {"_sparse_semi_structured_", "torch.nn.functional.linear of the dense weight"},
    {"_spsolve", "torch.linalg.solve of dense tensors"},
    {"_to_sparse_semi_structured", "the dense tensor"},
    {"_triton_multi_head_attention", "torch.nn.MultiheadAttention"},
    {"_triton_scaled_dot_attention", "torch.nn.functional.scaled_dot_product_attention"},
    {"baddbmm", "dense tensors"},
    {"bmm", "dense tensors"},
    {"conv_depthwise3d", "torch.nn.functional.conv3d with groups"},
    {"cudnn_affine_grid_generator", "torch.nn.functional.affine_grid"},
    {"cudnn_batch_norm", "torch.nn.functional.batch_norm"},
    {"cudnn_convolution", "torch.nn.functional.conv2d and its kind"},
    {"cudnn_grid_sampler", "torch.nn.functional.grid_sample"},
    {"miopen_batch_norm", "torch.nn.functional.batch_norm"},
    {"miopen_convolution", "torch.nn.functional.conv2d and its kind"},
    {"miopen_ctc_loss", "torch.nn.functional.ctc_loss"},
    {"miopen_depthwise_convolution", "torch.nn.functional.conv2d with groups"},
    {"miopen_rnn", "torch.nn.LSTM or torch.nn.GRU"},
};

// torch queries whether CUDA's libraries for losses can be used.
bool is_used(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) {
  return false;
}

bool is_used_by_lengths(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        int64_t) {
  return false;
}

}  // namespace

std::string instead_of(const c10::OperatorName& name) {
  std::string_view base = name.name;
  if (!base.starts_with("aten::")) return "";
  base.remove_prefix(6);
  for (const auto& [beginning, instead] : kInstead) {
    if (base.starts_with(beginning)) return std::string(instead);
  }
  return "";
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  register_own_kernel<"aten::_use_cudnn_ctc_loss", &is_used, Devices::kAny>(library);
  register_own_kernel<"aten::_use_cudnn_ctc_loss.Tensor", &is_used_by_lengths, Devices::kAny>(
      library);
  register_own_kernel<"aten::_use_miopen_ctc_loss", &is_used, Devices::kAny>(library);
  register_own_kernel<"aten::_use_miopen_ctc_loss.Tensor", &is_used_by_lengths, Devices::kAny>(
      library);
}

}  // namespace foo::aten
