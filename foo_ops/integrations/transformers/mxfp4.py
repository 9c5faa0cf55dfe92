"""Checkpoints whose experts are MXFP4, as gpt-oss's, with their weights as they are.

transformers multiplies MXFP4 on GPUs, and on CPUs with packages of kernels; otherwise it turns the
weights into bfloat16, which take four times the memory. With this package imported, models that are
loaded without a GPU keep them:

    model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b")
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from foo_ops.integrations.transformers.checkpoints import is_on_host
from foo_ops.integrations.transformers.experts import FLAGS, gate_of, weights_of
from foo_ops.ops.experts.quantized import moe_experts_quantized
from foo_ops.ops.linear_mxfp4 import GROUP_SIZE

METHOD = "mxfp4"


class FooMxfp4Experts(nn.Module):
    """Experts with weights of MXFP4, whose parameters have a checkpoint's names and shapes.

    Attributes:
        gate_up_proj_blocks, down_proj_blocks: (E, N, K / 32, 16) uint8, two numbers in a byte.
        gate_up_proj_scales, down_proj_scales: (E, N, K / 32) uint8, exponents.
        gate_up_proj_bias, down_proj_bias: (E, N), if the model has them.
        options: of `foo_ops.moe_experts`, those of the model's own gate.
    """

    def __init__(self, own: Any) -> None:
        """Make the experts that stand for a module of the model's own class."""
        super().__init__()
        up, down, up_bias, down_bias = weights_of(own)
        self.num_experts: int = up.shape[0]
        self.options: dict[str, Any] = gate_of(own)  # type: ignore[assignment]
        named = {"gate_up_proj": (up, up_bias), "down_proj": (down, down_bias)}
        for name, (weight, bias) in named.items():
            groups = (*weight.shape[:-1], weight.shape[-1] // GROUP_SIZE)
            blocks = weight.new_empty((*groups, GROUP_SIZE // 2), dtype=torch.uint8)
            scales = weight.new_empty(groups, dtype=torch.uint8)
            for part, tensor in (("blocks", blocks), ("scales", scales), ("bias", bias)):
                parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
                self.register_parameter(f"{name}_{part}", parameter)

    @classmethod
    def of_tensors(cls, own: Any, tensors: dict[str, tuple[Tensor, Tensor]]) -> FooMxfp4Experts:
        """Make experts without biases of blocks (E, N, K / 2) and exponents (E, N, K / 32)."""
        made = cls(own)
        for name, (blocks, scales) in tensors.items():
            of_groups = blocks.unflatten(-1, (-1, GROUP_SIZE // 2))
            for part, tensor in (("blocks", of_groups), ("scales", scales)):
                setattr(made, f"{name}_{part}", nn.Parameter(tensor, requires_grad=False))
        return made

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own: Any = self
        biases = (
            None if it is None else it.to(hidden_states.dtype)
            for it in (own.gate_up_proj_bias, own.down_proj_bias)
        )
        return moe_experts_quantized(
            hidden_states,
            top_k_index,
            top_k_weights,
            *(own.gate_up_proj_blocks.flatten(-2), own.gate_up_proj_scales, None),
            *(own.down_proj_blocks.flatten(-2), own.down_proj_scales, None),
            *biases,
            **self.options,
        )

    def extra_repr(self) -> str:
        experts, width, groups, _ = self.gate_up_proj_blocks.shape  # type: ignore[misc]
        return f"{experts} experts, {GROUP_SIZE * groups} -> {width}, MXFP4"


def can_be_mxfp4(module: Any) -> bool:
    """Whether a module has experts that `FooMxfp4Experts` can stand for."""
    if not all(hasattr(module, flag) for flag in FLAGS) or module.has_post_expert_norm:
        return False
    up, down, *_ = weights_of(module)
    has_groups = all(it.shape[-1] % GROUP_SIZE == 0 for it in (up, down))
    return bool(module.has_gate and has_groups and gate_of(module) is not None)


class FooMxfp4Quantizer(Mxfp4HfQuantizer):
    """transformers' quantizer of MXFP4, which keeps the weights on CPUs and ``foo``.

    With a GPU, and if the configuration says ``dequantize=True``, it is transformers' own.
    """

    is_ours = False

    def validate_environment(self, *arguments: Any, **keywords: Any) -> None:
        dequantizes = self.quantization_config.dequantize
        self.is_ours = bool(self.pre_quantized and is_on_host() and not dequantizes)
        if self.is_ours:
            # Parameters have the names of the checkpoint.
            self.serialized_names = {}
        else:
            super().validate_environment(*arguments, **keywords)

    def _process_model_before_weight_loading(
        self, model: Any, use_kernels: bool = False, **keywords: Any
    ) -> None:
        if not self.is_ours:
            super()._process_model_before_weight_loading(model, use_kernels, **keywords)
            return
        kept = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        for name, module in list(model.named_modules()):
            if can_be_mxfp4(module) and should_convert_module(name, kept):
                model.set_submodule(name, FooMxfp4Experts(module))

    def param_needs_quantization(self, model: Any, param_name: str, **keywords: Any) -> bool:
        if self.is_ours:
            return False
        return bool(super().param_needs_quantization(model, param_name, **keywords))

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, Any]]:
        if self.is_ours:
            return model.state_dict(), {}
        found: tuple[Any, dict[str, Any]] = super().get_state_dict_and_metadata(model)
        return found

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained: gradients flow through the experts."""
        return self.is_ours or bool(super().is_trainable)


def register_mxfp4() -> None:
    AUTO_QUANTIZER_MAPPING[METHOD] = FooMxfp4Quantizer
