"""Fast CPU operators with kernels in Python, the device ``foo``, and the kit to write more."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

# At the end of its import, torch calls our entry point (_entry_point), which finds that this import
# is under way.
import torch  # noqa: F401

from foo_ops._autoload import autoload

autoload()

# foo_ops.ops is imported when one of these is looked up.
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
__version__ = "0.2.0"
_MODULES = ("kernels", "language", "library", "ops")


if TYPE_CHECKING:
    from foo_ops import kernels, language, library, ops  # noqa: F401
    from foo_ops.ops import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            from foo_ops._operators import load

            load()
            value = globals()[name] = getattr(sys.modules["foo_ops.ops"], name)
            return value
        if name in _MODULES:
            return importlib.import_module(f"foo_ops.{name}")
        raise AttributeError(f"module 'foo_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
