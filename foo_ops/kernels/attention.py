"""What the kernels of attention share: the parameters, packing, and a tile of scores.

All of them work on tiles that lie *transposed* in scratch memory: a row for each key (or each
column of the value), with the queries of a block side by side in it. A vector then holds the scores
of several queries for one key, so that the softmax needs no operation across lanes, and keys and
values enter the products one broadcast element at a time, from where they are, at any strides. Only
the block of queries is packed, once.

A block has up to QUERY_BLOCK queries, a tile up to KEY_BLOCK keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import types

from foo_ops.kernels.matmul import lanes_of, matmul_of
from foo_ops.kernels.simd import (
    ELEMENTS,
    Pointer,
    address_of,
    fma,
    less,
    load,
    load_vector,
    pointer_to,
    ramp,
    select,
    shift,
    splat,
    store,
)
from foo_ops.kernels.struct import Struct, row_of

# As in csrc/ops/attention.cpp, which cuts the work and allocates the scratch memory.
QUERY_BLOCK = 64
KEY_BLOCK = 64

# Values of bias_kind.
BIAS_NONE, BIAS_BOOL, BIAS_OF_QUERY_DTYPE, BIAS_FLOAT32 = range(4)

SIZES = (
    *("query_heads", "key_heads", "query_length", "key_length", "head_dim", "value_dim"),
    *("is_causal", "bias_kind", "bias_batch", "bias_heads", "bias_rows", "bias_columns"),
    *("batch", "chunks"),
)
OPERANDS = (
    *("query", "key", "value", "attn_bias", "output", "logsumexp"),
    *("grad_output", "grad_logsumexp", "grad_query", "grad_key", "grad_value", "grad_attn_bias"),
)


def compute_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def argument_types(dtype: str) -> tuple[Any, ...]:
    """Parameters, scratch memory, and three numbers that name the piece of work."""
    pieces = (types.int64, types.int64, types.int64)
    return (_parameters(dtype), Pointer(compute_dtype(dtype)), *pieces)


def _parameters(dtype: str) -> Struct:
    """The struct Parameters of csrc/ops/attention.cpp.

    An operand is a pointer with its strides, in elements, for batch, head, row and column.
    grad_key and grad_value are sums in the compute type, which a last kernel rounds.
    """
    compute = compute_dtype(dtype)
    dtypes = dict.fromkeys(OPERANDS, dtype)
    dtypes |= dict.fromkeys(("logsumexp", "grad_logsumexp", "grad_key", "grad_value"), compute)
    # The dtype of the bias is known at run time only, by bias_kind.
    dtypes |= dict.fromkeys(("attn_bias", "grad_attn_bias"), "uint8")
    fields: list[tuple[str, types.Type]] = [("scale", types.float64)]
    fields += [(size, types.int64) for size in SIZES]
    for operand, operand_dtype in dtypes.items():
        fields.append((operand, Pointer(operand_dtype)))
        fields += [
            (f"{operand}_{axis}_stride", types.int64) for axis in ("batch", "head", "row", "column")
        ]
    return Struct("AttentionParameters", tuple(fields))


@njit
def round_up(count, multiple):
    return (count + multiple - 1) // multiple * multiple


@njit
def fill(target, count, value):
    for index in range(count):
        store(target, index, value)


@njit
def visible_keys(parameters, query_end):
    """One past the last key that a query before ``query_end`` sees."""
    if parameters.is_causal:
        return min(parameters.key_length, query_end)
    return parameters.key_length


@njit
def transpose(target, source, row_stride, column_stride, rows, columns, padded_rows):
    """target[column, row] = source[row, column], with zeros up to padded_rows."""
    for column in range(columns):
        line = shift(target, column * QUERY_BLOCK)
        start = shift(source, column * column_stride)
        for row in range(rows):
            store(line, row, load(start, row * row_stride))
        for row in range(rows, padded_rows):
            store(line, row, 0.0)


@njit
def compact(target, source, row_stride, column_stride, rows, columns, padded_columns):
    """target[row, column] = source[row, column], with zeros up to padded_columns."""
    for row in range(rows):
        line = shift(target, row * padded_columns)
        start = shift(source, row * row_stride)
        if column_stride == 1:
            for column in range(columns):
                store(line, column, load(start, column))
        else:
            for column in range(columns):
                store(line, column, load(start, column * column_stride))
        for column in range(columns, padded_columns):
            store(line, column, 0.0)


@functools.cache
def tiles_of(dtype: str) -> tuple[Callable, Callable]:
    """The functions that give a tile of keys and a tile of values in the compute type.

    ``key_tile(parameters, scratch, batch, head, start, count)`` returns a pointer, a row stride and
    a column stride: the key's own if it already has the compute type, else those of a converted
    copy in scratch. ``value_tile`` alike.
    """

    @njit
    def in_place(scratch, source, row_stride, column_stride, rows, columns):
        return source, row_stride, column_stride

    @njit
    def converted(scratch, source, row_stride, column_stride, rows, columns):
        compact(scratch, source, row_stride, column_stride, rows, columns, columns)
        return scratch, columns, 1

    tile = in_place if dtype == compute_dtype(dtype) else converted

    @njit
    def key_tile(parameters, scratch, batch, head, start, count):
        source = row_of(parameters, "key", batch, head, start)
        row_stride, column_stride = parameters.key_row_stride, parameters.key_column_stride
        return tile(scratch, source, row_stride, column_stride, count, parameters.head_dim)

    @njit
    def value_tile(parameters, scratch, batch, head, start, count):
        source = row_of(parameters, "value", batch, head, start)
        row_stride, column_stride = parameters.value_row_stride, parameters.value_column_stride
        return tile(scratch, source, row_stride, column_stride, count, parameters.value_dim)

    return key_tile, value_tile


@njit
def _load_bias(target, bias, row_stride, column_stride, rows, columns, count):
    """target[key, query] = bias[query, key], with zeros for queries from rows to columns."""
    for key in range(count):
        line = shift(target, key * QUERY_BLOCK)
        start = shift(bias, key * column_stride)
        for row in range(rows):
            store(line, row, load(start, row * row_stride))
        for row in range(rows, columns):
            store(line, row, 0.0)


@njit
def _load_mask(target, mask, row_stride, column_stride, rows, columns, count):
    """As _load_bias: zero where the mask is true and -infinity where it is false."""
    for key in range(count):
        line = shift(target, key * QUERY_BLOCK)
        start = shift(mask, key * column_stride)
        for row in range(rows):
            store(line, row, 0.0 if load(start, row * row_stride) else -math.inf)
        for row in range(rows, columns):
            store(line, row, 0.0)


@functools.cache
def scores_of(dtype: str) -> Callable:
    """The function that computes a tile of scores.

    ``scores(parameters, target, bias, keys, key_stride, dim_stride, queries, batch, head,
    query_start, key_start, rows, columns, count)``: target[key, query] = scale * k.q + bias, and
    -infinity where the query does not see the key. ``queries`` is a transposed block of ``rows``
    queries, padded to ``columns``; ``bias`` is scratch memory for a tile.
    """
    compute = ELEMENTS[dtype].compute
    LANES = lanes_of(compute_dtype(dtype))  # noqa: N806
    matmul = matmul_of(compute_dtype(dtype))
    own_dtype, as_float32, as_bool = pointer_to(dtype), pointer_to("float32"), pointer_to("bool")

    @njit
    def load_bias(parameters, target, batch, head, query_start, key_start, rows, columns, count):
        row_stride = parameters.attn_bias_row_stride
        column_stride = parameters.attn_bias_column_stride
        kind, address = parameters.bias_kind, address_of(parameters.attn_bias)
        offset = (
            batch * parameters.attn_bias_batch_stride
            + head * parameters.attn_bias_head_stride
            + query_start * row_stride
            + key_start * column_stride
        )
        if kind == BIAS_BOOL:
            mask = shift(as_bool(address), offset)
            _load_mask(target, mask, row_stride, column_stride, rows, columns, count)
        elif kind == BIAS_OF_QUERY_DTYPE:
            bias = shift(own_dtype(address), offset)
            _load_bias(target, bias, row_stride, column_stride, rows, columns, count)
        else:
            wide_bias = shift(as_float32(address), offset)
            _load_bias(target, wide_bias, row_stride, column_stride, rows, columns, count)

    @njit
    def scale_scores(target, bias, scale, has_bias, columns, count):
        factor = splat(compute(scale), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * QUERY_BLOCK + column
                score = load_vector(target, index, LANES)
                if has_bias:
                    score = fma(score, factor, load_vector(bias, index, LANES))
                else:
                    score = score * factor
                store(target, index, score)

    @njit
    def hide_later_keys(target, first_distance, columns, count):
        """first_distance: the first query's position minus the first key's."""
        zero, hidden = splat(compute(0.0), LANES), splat(compute(-math.inf), LANES)
        for key in range(count):
            for column in range(0, columns, LANES):
                index = key * QUERY_BLOCK + column
                distance = ramp(compute(first_distance + column - key), LANES)
                score = load_vector(target, index, LANES)
                store(target, index, select(less(distance, zero), hidden, score))

    @njit
    def scores(
        parameters, target, bias, keys, key_stride, dim_stride, queries,
        batch, head, query_start, key_start, rows, columns, count,
    ):  # fmt: skip
        matmul(
            target, QUERY_BLOCK, keys, key_stride, dim_stride,
            queries, QUERY_BLOCK, count, columns, parameters.head_dim, False,
        )  # fmt: skip
        has_bias = parameters.bias_kind != BIAS_NONE
        if has_bias:
            load_bias(parameters, bias, batch, head, query_start, key_start, rows, columns, count)
        scale_scores(target, bias, parameters.scale, has_bias, columns, count)
        if parameters.is_causal and key_start + count > query_start + 1:
            hide_later_keys(target, query_start - key_start, columns, count)

    return scores
