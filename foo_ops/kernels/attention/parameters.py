"""What launchers hand to the kernels of attention: parameters, and a piece of the work."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.core import types

from foo_ops.kernels.lang.scratch import Struct
from foo_ops.kernels.simd.types import Pointer, compute_dtype

# foo_ops/csrc/ops/attention/parameters.h has these as well, and tests/project/test_agreement.py
# compares them.
QUERY_BLOCK = 1024

KEY_BLOCK = 128

# Elements from a row of a tile to the next. A power of two would put the rows of a panel on few
# sets of the cache; this is an odd number of its lines.
TILE_STRIDE = 176

TILE = (KEY_BLOCK + 1) * TILE_STRIDE

# Values of bias_kind.
BIAS_NONE, BIAS_BOOL, BIAS_OF_QUERY_DTYPE, BIAS_FLOAT32 = range(4)

# Values of bias_gradient: none, a tile is written by one block, blocks add to sums.
GRADIENT_NONE, GRADIENT_STORED, GRADIENT_ADDED = range(3)

NUMBERS = ("scale", "factor", "softcap", "dropout_scale")

SIZES = (
    *("head_dim", "value_dim", "query_heads", "group", "key_heads", "batch"),
    *("modifies", "bias_kind", "bias_rows", "bias_columns", "bias_gradient"),
    *("has_alibi_slopes", "has_sinks", "dropout_threshold", "seed"),
    *("has_dropout_heads", "is_part"),
    *("page_size", "block_table_stride", "query_length", "key_length", "chunks"),
    "has_int8_cache",
    *("score_function", "masked_score_function", "gradient_function"),
    *("windows", "mask_batch_stride", "mask_head_stride", "mask_columns"),
    *("mask_query_block", "mask_key_block"),
)

# What programs are given, and what a mask of blocks says of windows and blocks: see programs.py.
PROGRAM_POINTERS = {"programs": "int64", "window_states": "int8", "block_states": "int8"}

OPERANDS = (
    *("query", "key", "value", "attn_bias", "alibi_slopes", "sinks", "output", "logsumexp"),
    *("grad_output", "grad_logsumexp", "grad_query", "grad_key", "grad_value", "grad_attn_bias"),
    *("grad_alibi_slopes", "grad_sinks", "partial_output", "partial_largest", "partial_total"),
    *("key_scale", "value_scale", "dropout_heads"),
)

IN_COMPUTE_TYPE = (
    *("alibi_slopes", "sinks", "logsumexp", "grad_logsumexp", "grad_key", "grad_value"),
    *("grad_alibi_slopes", "grad_sinks", "partial_output", "partial_largest", "partial_total"),
    *("key_scale", "value_scale"),
)

PIECE_FIELDS = (
    *("batch", "head", "heads", "query_start", "query_count", "query_offset", "key_offset"),
    *("key_start", "key_stop", "first_visible", "last_visible", "alignment"),
    *("slot", "key_split", "key_splits", "block", "bias", "begins_sums", "statistics"),
    "chunk",
)

PIECE = Struct("AttentionPiece", tuple((name, types.int64) for name in PIECE_FIELDS))

# Scores and maxima are in units of this: exp(x) = 2^(x / LOG2).
LOG2 = math.log(2.0)


def lowest_score(dtype: str) -> float:
    """The lowest score, which remains finite in units of log 2; the highest is as far from 0.

    A mask of finfo.min, as some libraries have it, is lower than all other scores, and yet nothing
    is hidden where all keys have it.
    """
    return 0.69 * float(np.finfo(compute_dtype(dtype)).min)


def argument_types(dtype: str, cache_dtype: str | None = None) -> tuple[Any, ...]:
    """Parameters, the piece of work, scratch memory, and where to write how much of it is
    needed. Key and value are of ``cache_dtype``, if it is not ``dtype``.
    """
    return (
        _parameters(dtype, cache_dtype or dtype),
        PIECE,
        Pointer(compute_dtype(dtype)),
        Pointer("int64"),
    )


def _parameters(dtype: str, cache_dtype: str) -> Struct:
    """The struct Parameters of foo_ops/csrc/ops/attention/parameters.h.

    An operand is a pointer with its strides, in elements, for batch, head, row and column. grad_key
    and grad_value are sums in the compute dtype, which a last kernel rounds.
    """
    dtypes = dict.fromkeys(OPERANDS, dtype) | dict.fromkeys(("key", "value"), cache_dtype)
    dtypes |= dict.fromkeys(IN_COMPUTE_TYPE, compute_dtype(dtype))
    dtypes["dropout_heads"] = "int64"
    # The dtype of the bias is known at run time only, by bias_kind.
    dtypes |= dict.fromkeys(("attn_bias", "grad_attn_bias"), "uint8")
    fields: list[tuple[str, types.Type]] = [(number, types.float64) for number in NUMBERS]
    fields += [(size, types.int64) for size in SIZES]
    fields.append(("block_table", Pointer("int32")))
    fields += [(name, Pointer(of)) for name, of in PROGRAM_POINTERS.items()]
    for operand, operand_dtype in dtypes.items():
        fields.append((operand, Pointer(operand_dtype)))
        fields += [
            (f"{operand}_{axis}_stride", types.int64) for axis in ("batch", "head", "row", "column")
        ]
    return Struct("AttentionParameters", tuple(fields))


def dim_name_of(operand: str) -> str:
    """The name of an operand's number of columns: head_dim or value_dim."""
    has_head_dim = operand in ("query", "key", "grad_query", "grad_key")
    return "head_dim" if has_head_dim else "value_dim"
