"""Operators of ``torch.ops.foo``; the file of each one registers it at its import.

Imported at the first use of an operator: see foo_ops/_operators.py.
"""

from foo_ops import _operators
from foo_ops.ops.abs import abs
from foo_ops.ops.attention.dense import attention
from foo_ops.ops.attention.int8_cache import attention_int8_cache, quantize_cache
from foo_ops.ops.attention.varlen import attention_varlen
from foo_ops.ops.cache_append import cache_append
from foo_ops.ops.cross_entropy.linear import linear_cross_entropy
from foo_ops.ops.cross_entropy.softmax import softmax_cross_entropy
from foo_ops.ops.experts.grouped_linear import grouped_linear
from foo_ops.ops.experts.mixture import moe_experts
from foo_ops.ops.experts.quantized import moe_experts_quantized
from foo_ops.ops.flex_attention.dense import flex_attention
from foo_ops.ops.flex_attention.varlen import flex_attention_varlen
from foo_ops.ops.layer_norm import add_layer_norm, layer_norm
from foo_ops.ops.linear import linear, linear_silu_mul
from foo_ops.ops.linear_fp8 import linear_fp8
from foo_ops.ops.linear_mxfp4 import dequantize_mxfp4, linear_mxfp4, quantize_mxfp4
from foo_ops.ops.linear_quantized import (
    dequantize_weight,
    linear_int4,
    linear_int8,
    quantize_weight,
)
from foo_ops.ops.linear_silu_mul_quantized import linear_silu_mul_quantized
from foo_ops.ops.linear_table4 import linear_table4
from foo_ops.ops.rms_norm import add_rms_norm, rms_norm
from foo_ops.ops.rotary_embedding import rotary_embedding
from foo_ops.ops.silu_mul import silu_mul

__all__ = [
    "abs",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_int8_cache",
    "attention_varlen",
    "cache_append",
    "dequantize_mxfp4",
    "dequantize_weight",
    "flex_attention",
    "flex_attention_varlen",
    "grouped_linear",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_fp8",
    "linear_int4",
    "linear_int8",
    "linear_mxfp4",
    "linear_silu_mul",
    "linear_silu_mul_quantized",
    "linear_table4",
    "moe_experts",
    "moe_experts_quantized",
    "quantize_cache",
    "quantize_mxfp4",
    "quantize_weight",
    "rms_norm",
    "rotary_embedding",
    "silu_mul",
    "softmax_cross_entropy",
]

_operators.complete()
