"""Checks that an operator is correct, on cpu and on foo; for anyone's operators.

An `OpSpec` says what the operator computes, and gives samples. `check_operator` runs every check on
it. With pytest each check is a test of its own, by a plugin in the package::

    @pytest.mark.operators(SCALE)
    def test_operator(operator_check):
        operator_check()

`OPERATORS` is the table of the package's own operators.
"""

from foo_ops.testing.arguments import LAYOUTS, copy_with_layout
from foo_ops.testing.checks import CHECKS, Case, OperatorCheckError, cases, check_operator
from foo_ops.testing.checks.compilation import KnownFaultWarning
from foo_ops.testing.spec import (
    OpSpec,
    Sample,
    check_gradients,
    check_outputs,
    cotangents_for,
    random,
)
from foo_ops.testing.specs.attention import ATTENTION
from foo_ops.testing.specs.attention_varlen import (
    ATTENTION_INT8_CACHE,
    ATTENTION_VARLEN,
    CACHE_APPEND,
)
from foo_ops.testing.specs.cross_entropy import LINEAR_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY
from foo_ops.testing.specs.elementwise import (
    ABS,
    ABS_IN_PLACE,
    ABS_OUT,
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    LAYER_NORM,
    RMS_NORM,
    ROTARY_EMBEDDING,
    ROTARY_EMBEDDING_IN_PLACE,
    SILU_MUL,
)
from foo_ops.testing.specs.experts import GROUPED_LINEAR, MOE_EXPERTS
from foo_ops.testing.specs.flex_attention import FLEX_ATTENTION, FLEX_ATTENTION_VARLEN
from foo_ops.testing.specs.linear import (
    LINEAR,
    LINEAR_ACTIVATION,
    LINEAR_FP8,
    LINEAR_INT4,
    LINEAR_INT4_ACTIVATIONS,
    LINEAR_INT8,
    LINEAR_INT8_ACTIVATIONS,
    LINEAR_MXFP4,
    LINEAR_SILU_MUL,
    LINEAR_SILU_MUL_QUANTIZED,
    LINEAR_SILU_MUL_QUANTIZED_ACTIVATIONS,
    LINEAR_TABLE4,
)

__all__ = [
    "ABS",
    "ADD_LAYER_NORM",
    "ADD_RMS_NORM",
    "ATTENTION",
    "ATTENTION_INT8_CACHE",
    "ATTENTION_VARLEN",
    "CACHE_APPEND",
    "CHECKS",
    "FLEX_ATTENTION",
    "FLEX_ATTENTION_VARLEN",
    "GROUPED_LINEAR",
    "LAYER_NORM",
    "LAYOUTS",
    "LINEAR",
    "LINEAR_ACTIVATION",
    "LINEAR_CROSS_ENTROPY",
    "LINEAR_FP8",
    "LINEAR_INT4",
    "LINEAR_INT4_ACTIVATIONS",
    "LINEAR_INT8",
    "LINEAR_INT8_ACTIVATIONS",
    "LINEAR_MXFP4",
    "LINEAR_SILU_MUL",
    "LINEAR_SILU_MUL_QUANTIZED",
    "LINEAR_SILU_MUL_QUANTIZED_ACTIVATIONS",
    "LINEAR_TABLE4",
    "MOE_EXPERTS",
    "OPERATORS",
    "RMS_NORM",
    "ROTARY_EMBEDDING",
    "SILU_MUL",
    "SOFTMAX_CROSS_ENTROPY",
    "Case",
    "KnownFaultWarning",
    "OpSpec",
    "OperatorCheckError",
    "Sample",
    "cases",
    "check_gradients",
    "check_operator",
    "check_outputs",
    "copy_with_layout",
    "cotangents_for",
    "random",
]

OPERATORS = (
    *(ABS, ABS_IN_PLACE, ABS_OUT),
    *(ATTENTION, ATTENTION_VARLEN, ATTENTION_INT8_CACHE),
    *(FLEX_ATTENTION, FLEX_ATTENTION_VARLEN),
    CACHE_APPEND,
    *(LINEAR, LINEAR_ACTIVATION, LINEAR_SILU_MUL),
    *(LINEAR_INT8, LINEAR_INT8_ACTIVATIONS, LINEAR_FP8),
    *(LINEAR_INT4, LINEAR_INT4_ACTIVATIONS, LINEAR_MXFP4, LINEAR_TABLE4),
    *(LINEAR_SILU_MUL_QUANTIZED, LINEAR_SILU_MUL_QUANTIZED_ACTIVATIONS),
    *(GROUPED_LINEAR, MOE_EXPERTS),
    LINEAR_CROSS_ENTROPY,
    *(LAYER_NORM, ADD_LAYER_NORM, RMS_NORM, ADD_RMS_NORM),
    *(SILU_MUL, SOFTMAX_CROSS_ENTROPY),
    *(ROTARY_EMBEDDING, ROTARY_EMBEDDING_IN_PLACE),
)
