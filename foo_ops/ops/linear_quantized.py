"""Linear layers with weights of 8 and 4 bits, and their quantisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import _C, library
from foo_ops.compat import is_fake
from foo_ops.library.operators import holds
from foo_ops.ops.arguments import require_device
from foo_ops.ops.dequantize import (
    GROUP_SIZES,
    check_quantized,
    groups_of,
    numbers_of_integers,
    pack_integers,
    require_dimensions,
    require_floating,
    unpack_integers,
)
from foo_ops.ops.linear import linear, product_flops

# ---------------------------------------------------------------------------------- quantize_weight


INT8_SMALLEST, INT8_LARGEST, INT4_LARGEST = -128, 127, 15
# Steps of a section: see foo_ops/csrc/ops/linear/integer.cpp.
SECTION = 512
# Rows whose largest magnitude is smaller are rounded to zeros: see
# foo_ops/kernels/simd/fixed_point.py.
SMALLEST_ROUNDED = 2.0**-100
# Rows that are converted to float64 at a time.
ROWS = 256
# Bytes of a weight that are dequantized at a time in a backward pass.
BLOCK = 2**19
METHODS = ("nearest", "hqq", "awq")


def quantize_weight(
    weight: Tensor,
    bits: int,
    group_size: int | None = None,
    *,
    method: str = "nearest",
    importance: Tensor | None = None,
    inputs: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Round the weight of a linear layer to integers of 8 or 4 bits, each to the nearest.

    It returns the tensors that follow ``input`` in `linear_int8` or `linear_int4`. With 8 bits a
    row, or each group of adjacent weights in a row, has one scale, which is its largest magnitude /
    127, and ``weight[n, k] = integer[n, k] * scale[n]``, or ``scale[n, g]`` with ``g = k //
    group_size``. With 4 bits each group has a scale and a zero, an integer, such that 0 to 15 span
    the group and 0.0: ``weight[n, k] = (integer[n, k] - zero[n, g]) * scale[n, g]``. In both, 0.0
    stays 0.0.

    Integers of 4 bits are packed two in a byte, within each group: byte ``j`` of a group has the
    integer of element ``j`` in the lower bits, and that of element ``group_size / 2 + j`` in the
    upper bits. So the lower bits of adjacent bytes belong to adjacent elements, and so do the upper
    bits: vectors unpack them without a shuffle.

    ``method="hqq"`` looks for other scales and zeros of 4 bits, which need not be integers, by
    half-quadratic splitting (Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine
    Learning Models"): errors are shrunk as for a norm with exponent 0.7, and the scale and the zero
    that leave the smallest squares are computed, 20 times in turn. Groups for which this is no
    better stay as they were. It takes about ten times as long, and 0.0 does not stay 0.0.

    ``method="awq"`` needs a sample of the layer's inputs, and makes the error of its outputs small
    (Lin et al. 2023, "AWQ: Activation-aware Weight Quantization"). Columns whose inputs are large
    get a finer grid: ``weight * input_scale`` is rounded, and the layer's inputs must be divided by
    ``input_scale``, which is returned, too. It is a power of each input's mean magnitude; of 20
    exponents, from 0 on, the one is taken that leaves the smallest squared error of the sample's
    outputs. Then each group may have a narrower range, down to 0.7 of what spans its weights, where
    that leaves a smaller error. Zeros are integers, and 0.0 stays 0.0. With 256 rows of inputs it
    takes about twenty times as long as rounding to the nearest.

    Args:
        weight: (N, K), float16, bfloat16, float32 or float64, finite. Values are not checked on the
            meta device, in fake tensors and in compiled graphs.
        bits: 8 or 4.
        group_size: 32, 64 or 128, of which K must be a multiple; with 8 bits also None, for one
            scale for each row.
        method: "nearest", or for 4 bits "hqq" or "awq".
        importance: (K,) for "hqq", how much the squared error of a column's weights matters: at
            best the mean square of that input of the layer, over a few hundred tokens. None if all
            are alike.
        inputs: (..., K) for "awq", floating-point numbers, inputs of the layer: a few hundred rows
            of real ones. Computed with in float32.

    Returns:
        With 8 bits weight (N, K) int8 and scale (N,) or (N, K / group_size); with 4 bits weight
        (N, K / 2) uint8, and scale and zero (N, K / group_size). Scale and zero are of weight's
        dtype. A scale is rounded up, so that no integer is too large, or down if 127 or 15 times
        the scale is infinite.

        With "awq" a fourth one, input_scale (1, K) of weight's dtype: ``linear_int4(input /
        input_scale, weight, scale, zero, bias, group_size=group_size)`` is the layer. A module
        whose result is this input, such as a norm with a weight, may be divided by it instead. As
        it has two dimensions, it is never taken for a bias.

    Raises:
        ValueError: for other bits, group sizes or methods, a K that is no multiple of the group,
            another number of dimensions, infinities and NaN, an importance that is negative, or
            given with another method than "hqq", and inputs that are missing for "awq", given with
            another method, or without rows.
        TypeError: for a weight of another dtype, and for bits or a group_size that are not int.

    Example:
        >>> weight, scale = foo_ops.quantize_weight(torch.tensor([[1.0, -127.0], [0.0, 0.0]]), 8)
        >>> weight
        tensor([[   1, -127],
                [   0,    0]], dtype=torch.int8)
        >>> scale
        tensor([1., 1.])
    """
    _check(weight, bits, group_size)
    _check_method(weight, bits, method, importance, inputs)
    if method == "awq":
        sample: Any = inputs
        size: Any = group_size
        scale = column_scale([weight], size, sample).to(weight.dtype)
        return *quantize_for_inputs(weight, size, sample, scale), scale.unsqueeze(0)
    rounded: Any = to_int8 if bits == 8 else _to_int4
    if method == "hqq":
        rounded = partial(_to_int4_by_splitting, importance=importance)
    parts = [rounded(rows.double(), weight.dtype, group_size) for rows in _blocks(weight)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts))


def _blocks(weight: Tensor) -> Sequence[Tensor]:
    """Cut a weight into blocks of rows that are rounded at a time."""
    # A graph is run with values later; tensors without values take no memory, however many rows.
    at_once = not torch.compiler.is_compiling() and _has_no_numbers(weight)
    return [weight.detach()] if at_once else weight.detach().split(ROWS)


def dequantize_weight(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Return the numbers that `quantize_weight` rounded to, (N, K), in scale's dtype.

    They are computed in float32 (float64 for float64), and rounded once.

    Args:
        weight: int8 (N, K), or with ``zero`` uint8 (N, K / 2).
        scale: (N, K / group_size), or without ``zero`` also (N,).
        zero: of scale's shape.

    Raises:
        ValueError: for shapes that do not fit together, and groups that are not of 32, 64 or 128.
        TypeError: for dtypes.

    Example:
        >>> quantized = foo_ops.quantize_weight(torch.arange(32.0)[None], 4, group_size=32)
        >>> foo_ops.dequantize_weight(*quantized)[0, ::8]
        tensor([ 0.0000,  8.2667, 16.5333, 24.8000])
    """
    check_quantized("dequantize_weight", weight, scale, zero)
    return numbers_of_integers(weight, scale, zero)


# ------------------------------------------------------------------------------------------ checks


def _check(weight: Tensor, bits: int, group_size: int | None) -> None:
    name = "quantize_weight"
    require_floating(name, "weight", weight)
    require_dimensions(name, "weight", weight, "N", "K")
    for argument, number in (("bits", bits), ("group_size", group_size)):
        if number is not None and not isinstance(number, Integral):
            raise TypeError(f"{name}: {argument} must be an int, got {type(number).__name__}")
    if bits not in (4, 8):
        raise ValueError(f"{name}: bits must be 8 or 4, got {bits}")
    if bits == 8 and group_size not in (None, *GROUP_SIZES):
        raise ValueError(
            f"{name}: group_size must be None, 32, 64 or 128 for 8 bits, got {group_size}"
        )
    if bits == 4 and group_size not in GROUP_SIZES:
        raise ValueError(f"{name}: group_size must be 32, 64 or 128 for 4 bits, got {group_size}")
    if group_size is not None and not holds(weight.shape[1] % group_size == 0):
        raise ValueError(
            f"{name}: weight must have whole groups of {group_size} columns, got {weight.shape[1]}"
        )
    if not (_has_no_numbers(weight) or _is_finite(weight)):
        raise ValueError(f"{name}: weight must be finite, got infinities or NaN")


def _check_method(
    weight: Tensor, bits: int, method: str, importance: Tensor | None, inputs: Tensor | None
) -> None:
    name = "quantize_weight"
    if method not in METHODS:
        raise ValueError(f"{name}: method must be 'nearest', 'hqq' or 'awq', got {method!r}")
    if method != "nearest" and bits == 8:
        raise ValueError(f"{name}: method must be 'nearest' for 8 bits, got {method!r}")
    given = {"importance": (importance, "hqq"), "inputs": (inputs, "awq")}
    for argument, (tensor, its_method) in given.items():
        if tensor is not None and method != its_method:
            raise ValueError(f"{name}: {argument} must be None for method {method!r}, got a tensor")
    if importance is not None:
        _check_importance(weight, importance)
    if method == "awq":
        _check_inputs(weight, inputs)


def _check_importance(weight: Tensor, importance: Tensor) -> None:
    name = "quantize_weight"
    require_floating(name, "importance", importance)
    require_dimensions(name, "importance", importance, "K")
    require_device(name, weight=weight, importance=importance)
    if not holds(importance.shape[0] == weight.shape[1]):
        raise ValueError(
            f"{name}: importance must have {weight.shape[1]} elements, one for each column of "
            f"weight, got {importance.shape[0]}"
        )
    if not (_has_no_numbers(importance) or bool((importance >= 0).all())):
        raise ValueError(f"{name}: importance must not be negative, got numbers below 0 or NaN")


def _check_inputs(weight: Tensor, inputs: Tensor | None) -> None:
    name = "quantize_weight"
    if inputs is None:
        raise ValueError(f"{name}: inputs must be a tensor for method 'awq', got None")
    require_floating(name, "inputs", inputs)
    require_device(name, weight=weight, inputs=inputs)
    if inputs.dim() == 0 or not holds(inputs.shape[-1] == weight.shape[1]):
        raise ValueError(
            f"{name}: inputs must have shape (..., {weight.shape[1]}), a number for each column of "
            f"weight, got {tuple(inputs.shape)}"
        )
    if not holds(math.prod(inputs.shape[:-1]) > 0):
        raise ValueError(f"{name}: inputs must have a row or more, got {tuple(inputs.shape)}")
    if not (_has_no_numbers(inputs) or bool(inputs.isfinite().all())):
        raise ValueError(f"{name}: inputs must be finite, got infinities or NaN")


def _has_no_numbers(weight: Tensor) -> bool:
    """Whether a weight's values cannot be read: on the meta device, or while a graph is made."""
    return torch.compiler.is_compiling() or weight.is_meta or is_fake(weight)


def _is_finite(weight: Tensor) -> bool:
    return all(bool(rows.isfinite().all()) for rows in weight.detach().split(ROWS))


# --------------------------------------------------------------------------------------- rounding


def to_int8(weight: Tensor, dtype: torch.dtype, group_size: int | None) -> tuple[Tensor, ...]:
    """Round a finite float64 weight as `quantize_weight` does, with scales of a dtype."""
    groups = weight if group_size is None else _in_groups(weight, group_size)
    largest = groups.abs().amax(-1) if groups.shape[-1] else groups.new_zeros(groups.shape[:-1])
    scale = _scale_of(largest / INT8_LARGEST, INT8_LARGEST, dtype)
    steps = (groups / scale.double().unsqueeze(-1)).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
    return steps.to(torch.int8).flatten(1), scale


def _to_int4(
    weight: Tensor, dtype: torch.dtype, group_size: int, shrinkage: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Round a finite weight as `quantize_weight` does, with scales of a dtype.

    Args:
        shrinkage: (N, groups), factors of the ranges; None for 1.
    """
    groups = _in_groups(weight, group_size)
    integers, scale, zero = _integers_of(groups, *_span(groups, shrinkage), dtype)
    return pack_integers(integers.to(torch.uint8)), scale, zero.to(dtype)


def _span(groups: Tensor, shrinkage: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """Return the ends, (N, groups), of the ranges that span 0.0 and the numbers of each group."""
    ends = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    return ends if shrinkage is None else (ends[0] * shrinkage, ends[1] * shrinkage)


def _integers_of(
    groups: Tensor, lowest: Tensor, highest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Round numbers to 16 steps between two ends.

    Returns:
        integers and zero in the dtype of groups, and scale in the other.
    """
    scale = _scale_of(highest / INT4_LARGEST - lowest / INT4_LARGEST, INT4_LARGEST, dtype)
    step = scale.to(groups.dtype)
    zero = (-lowest / step).round()
    # If zero was rounded, one end of the range is beyond the weights and may be infinite.
    below, above = (end - _overflows(end, scale).to(end) for end in (zero, INT4_LARGEST - zero))
    steps = (groups / step.unsqueeze(-1)).round().clamp(-below.unsqueeze(-1), above.unsqueeze(-1))
    return steps + zero.unsqueeze(-1), scale, zero


EXPONENT, STRENGTH, GROWTH, STEPS = 0.7, 10.0, 1.01, 20
"""Options of the splitting, as in Badri and Shaji's own code."""


def _to_int4_by_splitting(
    weight: Tensor, dtype: torch.dtype, group_size: int, importance: Tensor | None
) -> tuple[Tensor, ...]:
    """Round as `_to_int4` does, with the scales and zeros of half-quadratic splitting."""
    integers, *nearest = _to_int4(weight, dtype, group_size)
    groups = _in_groups(weight, group_size).float()
    factors = torch.ones_like(groups[:1])
    if importance is not None:
        factors = _in_groups(importance.float().unsqueeze(0), group_size)
    scale, zero = _split(groups, factors, *(it.float().unsqueeze(-1) for it in nearest))
    scale, zero = scale.squeeze(-1).to(dtype), zero.squeeze(-1).to(dtype)
    steps = _steps(groups, scale.float().unsqueeze(-1), zero.float().unsqueeze(-1))
    found = pack_integers(steps.nan_to_num().to(torch.uint8)), scale, zero
    errors = [_squared_error(groups, factors, *it) for it in (found, (integers, *nearest))]
    is_better = errors[0] < errors[1]
    per_byte = is_better.repeat_interleave(group_size // 2, 1)
    places = (per_byte, is_better, is_better)
    return tuple(map(torch.where, places, found, (integers, *nearest)))


def _split(groups: Tensor, factors: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and zeros (N, groups, 1), from those that span each group and 0.0."""
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    span = (highest - lowest) / INT4_LARGEST
    scale, zero = torch.where(span > 0, span, scale), torch.where(span > 0, -lowest / span, zero)
    total, strength = factors.sum(-1, keepdim=True), STRENGTH

    def mean(numbers: Tensor) -> Tensor:
        return (factors * numbers).sum(-1, keepdim=True) / total

    for _ in range(STEPS):
        steps = _steps(groups, scale, zero)
        errors = groups / scale + zero - steps
        shrunk = (errors.abs() - errors.abs().pow(EXPONENT - 1) / strength).clamp(min=0)
        targets = groups - errors.sign() * shrunk * scale
        from_mean, mean_target = steps - mean(steps), mean(targets)
        spread = mean(from_mean.square())
        slope = mean((targets - mean_target) * from_mean) / spread
        # Where all steps are the same, any scale fits.
        scale = torch.where(slope > 0, slope, scale)
        zero = mean(steps) - mean_target / scale
        strength *= GROWTH
    return scale, zero


def _steps(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (groups / scale + zero).round().clamp(0, INT4_LARGEST)


def _squared_error(
    groups: Tensor, factors: Tensor, integers: Tensor, scale: Tensor, zero: Tensor
) -> Tensor:
    """Return the sum over each group, (N, groups); infinite if numbers are."""
    numbers = _in_groups(dequantize_weight(integers, scale, zero), groups.shape[-1])
    return (factors * (numbers.float() - groups).square()).sum(-1)


EXPONENTS = 20
"""Exponents that are tried for the scales of columns: 0, 1 / 20, ..., 19 / 20."""
SHRINKAGES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Factors that are tried for the range of a group. Smaller ones win nowhere in all-MiniLM-L6-v2."""
SMALLEST_MAGNITUDE = 1e-4
"""The least magnitude of a column, relative to the largest, that its scale is computed from."""


def column_scale(
    weights: Sequence[Tensor],
    group_size: int,
    inputs: Tensor,
    magnitudes: Tensor | None = None,
) -> Tensor:
    """Search for factors of columns, with which rounding leaves the smallest error of outputs.

    Args:
        weights: (N, K) each, of layers with the same inputs, which are then divided by the factors.
        inputs: (..., K).
        magnitudes: (K,), the numbers whose powers are tried; None for the means of the inputs'
            magnitudes. Columns with the same magnitude get the same factor.

    Returns:
        (K,) float32, whose largest element is the inverse of the smallest.
    """
    rows = rows_of(inputs.detach().float())
    if not rows.shape[1]:
        return rows.new_ones(0)
    sizes = rows.abs().mean(0) if magnitudes is None else magnitudes.float()
    sizes = (sizes / sizes.amax()).clamp(min=SMALLEST_MAGNITUDE)
    rows = _fewer_rows(rows)

    def scale_of(exponent: Tensor | float) -> Tensor:
        scale = sizes**exponent
        return scale / (scale.amax() * scale.amin()).sqrt()

    def error_of(exponent: float) -> Tensor:
        scale = scale_of(exponent)
        errors = (
            _output_error(part.float(), scale, rows, group_size, weight.dtype)
            for weight in weights
            for part in _blocks(weight)
        )
        return sum(errors, rows.new_zeros(()))

    errors = torch.stack([error_of(step / EXPONENTS) for step in range(EXPONENTS)])
    # Without a finite error, the first exponent, 0, is taken.
    return scale_of(errors.nan_to_num(torch.inf).argmin() / EXPONENTS)


def _fewer_rows(inputs: Tensor) -> Tensor:
    """Return inputs (R, K), or K rows that give every weight an output of the same norm."""
    return inputs if inputs.shape[0] <= inputs.shape[1] else torch.linalg.qr(inputs, mode="r").R


def _output_error(
    weight: Tensor, scale: Tensor, inputs: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Return the squared error of outputs, if ``weight * scale`` is rounded to the nearest."""
    groups = _in_groups(weight * scale, group_size)
    errors = _rounding_errors(groups, dtype).flatten(1) / scale
    return F.linear(inputs, errors).square().sum()


def _rounding_errors(groups: Tensor, dtype: torch.dtype, shrinkage: float | None = None) -> Tensor:
    integers, scale, zero = _integers_of(groups, *_span(groups, shrinkage), dtype)
    return (integers - zero.unsqueeze(-1)) * scale.to(groups.dtype).unsqueeze(-1) - groups


def quantize_for_inputs(
    weight: Tensor, group_size: int, inputs: Tensor, scale: Tensor
) -> tuple[Tensor, ...]:
    """Round ``weight * scale`` to 4 bits, with ranges that suit ``inputs / scale``.

    Args:
        inputs: (..., K).
        scale: (K,), factors of columns.
    """
    rows = _fewer_rows(rows_of(inputs.detach().float() / scale.float()))
    by_group = _in_groups(rows, group_size).transpose(0, 1)
    moments = by_group.mT @ by_group
    parts = []
    for part in _blocks(weight):
        scaled = part.double() * scale.double()
        shrinkage = _shrinkage(_in_groups(scaled, group_size).float(), weight.dtype, moments)
        parts.append(_to_int4(scaled, weight.dtype, group_size, shrinkage))
    return tuple(torch.cat(tensors) for tensors in zip(*parts))


def _shrinkage(groups: Tensor, dtype: torch.dtype, moments: Tensor) -> Tensor:
    """Return the factors of ranges, (N, groups), that leave the smallest errors of outputs.

    Args:
        moments: (groups, group_size, group_size), sums of products of a group's inputs.
    """

    def error_of(shrinkage: float) -> Tensor:
        errors = _rounding_errors(groups, dtype, shrinkage).transpose(0, 1)
        return ((errors @ moments) * errors).sum(-1).t()

    smallest, found = error_of(1.0), torch.ones_like(groups[..., 0])
    for shrinkage in SHRINKAGES:
        error = error_of(shrinkage)
        found = torch.where(error < smallest, shrinkage, found)
        smallest = torch.minimum(error, smallest)
    return found


def _in_groups(weight: Tensor, group_size: int) -> Tensor:
    return weight.reshape(weight.shape[0], weight.shape[1] // group_size, group_size)


def _scale_of(exact: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Round up to a dtype, or down if ``steps`` times the scale would be infinite in it.

    A row or group of zeros may have any scale.
    """
    info = torch.finfo(dtype)
    nearest = exact.to(dtype)
    above = (nearest.double() * (1 + info.eps) + info.smallest_normal * info.eps).to(dtype)
    scale = torch.where(nearest.double() < exact, above, nearest)
    below = (scale.double() * (1 - info.eps / 2)).to(dtype)
    return torch.where(_overflows(steps, scale), below, scale).masked_fill(exact == 0, 1.0)


def _overflows(steps: Tensor | int, scale: Tensor) -> Tensor:
    return (steps * scale.double()).to(scale.dtype).isinf()


# --------------------------------------------------------------------------------- foo::linear_int8


library.define(
    "foo::linear_int8",
    "(Tensor input, Tensor weight, Tensor scale, Tensor? bias=None, *, int? activations=None, "
    "bool by_section=False) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def linear_int8(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    """Compute ``input @ (weight * scale).T + bias`` with integers of 8 bits.

    For few rows, it reads a quarter of the memory of float32 weights. `quantize_weight` makes
    ``weight`` and ``scale``.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), int8; fastest if the elements of a row are adjacent.
        scale: (N,), or (N, K / group_size) for each group of 32, 64 or 128 elements of a row; of
            input's dtype.
        bias: (N,), of input's dtype.
        activations: 8 to round input to integers of 8 bits, and multiply integers: faster, and less
            exact. None computes with input as it is.
        by_section: round input and weight to 8 bits for each section of 512 elements of a row, in
            place of groups: for many rows faster still.

    Returns:
        A contiguous tensor (..., N) of input's dtype. Products with the integers, which are exact
        in bfloat16, are summed up in float32 (float64 for float64), scaled, and rounded once, the
        bias included. With groups, weights are scaled before they are multiplied, in float32
        (float64); for more than 8 rows, they are rounded to bfloat16 if the processor multiplies
        bfloat16 inputs itself (AVX512-BF16, AMX). The result does not depend on the number of
        threads. Has gradients for input, scale and bias, of every order; those for a bfloat16 or
        float16 input use weights that are rounded to its dtype.

        With ``activations=8``, each row of input, or each group of steps that shares a scale, is
        rounded to multiples of its largest magnitude / 127, to the nearest and ties to even: an
        element is off by at most 1/254 of that magnitude. Products of integers are summed up
        exactly for a group, or for 512 steps or more, then scaled and summed up in float32. A row
        with infinities or NaN gives NaN, and one whose largest magnitude is below 2^-100 counts as
        zeros. The gradient for input is that of the weights, as if it had not been rounded.

        With ``by_section``, each section of input is rounded so, and weights of groups become
        multiples of 1 / 127 of the largest number that integers from -128 to 127 and the scales of
        their section can make. Gradients are as if neither had been rounded, except that scale's is
        that of rounded input.

    Raises:
        ValueError: for shapes that do not fit together, other numbers of bits, and by_section
            without ``activations`` or groups.
        TypeError: for dtypes, and float64 with ``activations``.

    Example:
        >>> weight, scale = foo_ops.quantize_weight(torch.tensor([[127.0, 2.0], [0.0, 254.0]]), 8)
        >>> foo_ops.linear_int8(torch.tensor([[1.0, 2.0]]), weight, scale)
        tensor([[131., 508.]])
    """
    return torch.ops.foo.linear_int8.default(
        input, weight, scale, bias, activations=activations, by_section=by_section
    )


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("foo::linear_int8")
def fake_int8(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    _C.check_linear_int8(input, weight, scale, bias, activations, by_section)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


# --------------------------------------------------------------------------------- foo::linear_int4


library.define(
    "foo::linear_int4",
    "(Tensor input, Tensor weight, Tensor scale, Tensor zero, Tensor? bias=None, *, "
    "int group_size, int? activations=None, bool by_section=False) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def linear_int4(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    """Compute ``input @ ((integers - zero) * scale).T + bias`` with integers of 4 bits.

    For few rows, it reads an eighth of the memory of float32 weights, besides scale and zero.
    `quantize_weight` makes ``weight``, ``scale`` and ``zero``, and documents how they are packed.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K / 2), uint8, two integers in each; fastest if the elements of a row are
            adjacent.
        scale: (N, K / group_size), of input's dtype.
        zero: (N, K / group_size), of input's dtype. It need not be an integer.
        bias: (N,), of input's dtype.
        group_size: 32, 64 or 128 elements of a row that share a scale and a zero.
        activations: 8 to round input to integers of 8 bits, and multiply integers: faster, and less
            exact. None computes with input as it is.
        by_section: round input and weight to 8 bits for each section of 512 elements of a row, in
            place of groups: for many rows faster still.

    Returns:
        A contiguous tensor (..., N) of input's dtype. Weights and sums are computed in float32
        (float64 for float64); the sums are rounded once, the bias included. Up to 8 rows of the
        other dtypes are multiplied in integers: each group of input is rounded to multiples of a
        power of two, and its largest magnitude is at least 16 256 (bfloat16) or 4 161 536 (float16,
        float32) times that power; bfloat16 numbers are exact down to a 64th of the largest. If the
        processor multiplies bfloat16 itself (AVX512-BF16, AMX), more rows use weights that are
        rounded to bfloat16. All gradients for a bfloat16 or float16 input use rounded weights. The
        result does not depend on the number of threads. Has gradients for input, scale, zero and
        bias, of every order.

        With ``activations=8``, each group of input is rounded as by `foo_ops.linear_int8`, with
        ``by_section`` each section, and weights too: to multiples of 1 / 127 of the largest number
        that integers from 0 to 15 and the zeros and scales of their section can make.

    Raises:
        ValueError: for shapes that do not fit together, other group sizes, other numbers of bits,
            and by_section without ``activations``.
        TypeError: for dtypes, and float64 with ``activations``.

    Example:
        >>> weight = torch.arange(32.0).reshape(1, 32) % 16
        >>> quantized = foo_ops.quantize_weight(weight, 4, group_size=32)
        >>> foo_ops.linear_int4(torch.ones(2, 32), *quantized, group_size=32)
        tensor([[240.],
                [240.]])
    """
    return torch.ops.foo.linear_int4.default(
        input,
        weight,
        scale,
        zero,
        bias,
        group_size=group_size,
        activations=activations,
        by_section=by_section,
    )


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("foo::linear_int4")
def fake_int4(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    _C.check_linear_int4(input, weight, scale, zero, bias, group_size, activations, by_section)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


# ----------------------------------------------------------------------------- autograd, for both


def rounded_rows(input: Tensor, groups: int | None, by_section: bool = False) -> Tensor:
    """Round rows to 8 bits as the kernels do; the gradient passes straight through."""
    if by_section:
        return torch.cat([rounded_rows(it, None) for it in input.split(SECTION, -1)], -1)
    depth, numbers = input.shape[-1], input.detach().float()
    # One scale for a row is that of one group.
    count = 1 if groups is None else groups
    columns = numbers.reshape(*input.shape[:-1], count, depth // torch.sym_max(count, 1))
    # There may be no steps.
    scale, inverse = _scale_of_bytes(F.pad(columns.abs(), (0, 1)).amax(-1, keepdim=True))
    rounded = ((columns * inverse).round() * scale).reshape(input.shape)
    return input.float() - numbers + rounded


def error_of_sections(weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return what the kernels change in the numbers of groups by rounding them to 8 bits again."""
    groups, numbers = scale.shape[1], numbers_of_integers(weight, scale, zero).float()
    factor, integers = scale.float().unsqueeze(-1), unpack_integers(weight, groups)
    if zero is None:
        ends, steps = [INT8_SMALLEST * factor], integers.float()
    else:
        begin = zero.float().unsqueeze(-1)
        ends, steps = [factor * begin, factor * (INT4_LARGEST - begin)], integers - begin
    largest = torch.cat(ends, -1).abs().amax(-1)
    per_section = SECTION // torch.sym_max(integers.shape[-1], 1)
    width, inverse = (
        it.repeat_interleave(per_section, -1)[:, :groups].unsqueeze(-1)
        for it in _scale_of_bytes(_in_sections(largest, per_section).amax(-1))
    )
    return ((steps * (factor * inverse)).round() * width).flatten(1) - numbers


def _in_sections(numbers: Tensor, size: int) -> Tensor:
    """Return (..., K) as (..., sections, size), with zeros behind the last number."""
    padded = F.pad(numbers, (0, -numbers.shape[-1] % size))
    return padded.unflatten(-1, (padded.shape[-1] // size, size))


def _scale_of_bytes(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale with which numbers up to a magnitude become -127 to 127, and its inverse."""
    is_zero = largest < SMALLEST_ROUNDED
    inverse = (torch.full_like(largest, INT8_LARGEST) / largest).masked_fill(is_zero, 0.0)
    return (largest / INT8_LARGEST).masked_fill(is_zero, 0.0), inverse


def _composite(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    activations: int | None,
    by_section: bool,
) -> Tensor:
    if activations is not None:
        input = rounded_rows(input, groups_of(scale), by_section).to(input.dtype)
    output = F.linear(input, numbers_of_integers(weight, scale, zero), bias)
    if not by_section:
        return output
    # Derivatives are those of the numbers before.
    error = error_of_sections(weight, scale.detach(), None if zero is None else zero.detach())
    return output + F.linear(input.detach(), error.to(input.dtype))


def composite_int8(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    """Compute the same with torch's own operators, for forward mode."""
    return _composite(input, weight, scale, None, bias, activations, by_section)


def composite_int4(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
    activations: int | None = None,
    by_section: bool = False,
) -> Tensor:
    """Compute the same with torch's own operators, for forward mode."""
    return _composite(input, weight, scale, zero, bias, activations, by_section)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, *scales, _ = inputs
    _, _, *need_scales, _ = ctx.needs_input_grad
    ctx.save_for_backward(input if any(need_scales) else None, weight, *scales)


def setup_context_of_integers(
    ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: dict[str, Any]
) -> None:
    setup_context(ctx, inputs, output)
    ctx.activations = keyword_only_inputs["activations"]
    ctx.by_section = keyword_only_inputs["by_section"]


def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, *scales = ctx.saved_tensors
    needs_input, _, *need_scales, needs_bias = ctx.needs_input_grad
    grad_input = grad_bias = None
    grad_scales: tuple[Tensor | None, ...] = (None,) * len(scales)
    if needs_input:
        grad_input = grad_of_input(grad_output, numbers_of_integers, weight, *scales)
    if any(need_scales):
        if ctx.activations is not None:
            input = rounded_rows(input, groups_of(scales[0]), ctx.by_section)
        grad_scales = grads_of_scales(grad_of_weight(grad_output, input), weight, *scales)
    if needs_bias:
        grad_bias = rows_of(grad_output).sum(0)
    return grad_input, None, *grad_scales, grad_bias


def grad_of_input(
    grad_output: Tensor, dequantize: Callable[..., Tensor], weight: Tensor, *scales: Tensor | None
) -> Tensor:
    """Return the gradient (..., K), by blocks of columns whose numbers stay in the caches.

    To dequantize all of a large weight takes longer than its product, since its memory is new.
    """
    parts = columns_in_blocks(weight, *scales)
    grads = [linear(grad_output, dequantize(*part).t()) for part in parts]
    return grads[0] if len(grads) == 1 else torch.cat(grads, -1)


def columns_in_blocks(weight: Tensor, *scales: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    """Cut a quantized weight and its scales into blocks of whole groups, of about `BLOCK` bytes.

    Scales (N,) belong to all columns.
    """
    rows, width = weight.shape
    # A graph for weights of every size has one block.
    if not (isinstance(rows, int) and isinstance(width, int)) or rows * width <= BLOCK:
        return [(weight, *scales)]
    by_group = [it for it in scales if it is not None and it.dim() == 2]
    groups = by_group[0].shape[1] if by_group else width
    count = max(1, BLOCK // (rows * (width // groups)))

    def parts(tensor: Tensor | None) -> Sequence[Tensor | None]:
        if tensor is None or tensor.dim() == 1:
            return [tensor] * -(-groups // count)
        return tensor.split(tensor.shape[1] // groups * count, 1)

    return list(zip(*map(parts, (weight, *scales))))


def grads_of_scales(
    grad: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the gradient of scale, and that of zero if there is one.

    Args:
        grad: the gradient, (N, K), of the dequantized weight.
    """
    integers = unpack_integers(weight, groups_of(scale))
    grad = grad.reshape(integers.shape)
    if zero is None:
        return ((grad * integers).sum(-1).to(scale.dtype),)
    steps = integers - zero.to(grad.dtype).unsqueeze(-1)
    grad_zero = -(grad * scale.unsqueeze(-1)).sum(-1)
    return (grad * steps).sum(-1).to(scale.dtype), grad_zero.to(zero.dtype)


def grad_of_weight(grad_output: Tensor, input: Tensor) -> Tensor:
    """Return the gradient, (N, K), in the compute type, since its elements are summed."""
    wide = torch.promote_types(input.dtype, torch.float32)
    rows, columns = (rows_of(it).to(wide) for it in (grad_output, input))
    return linear(rows.t(), columns.t())


def rows_of(tensor: Tensor) -> Tensor:
    """Return a matrix of the rows of a tensor of any number of dimensions."""
    return tensor.unsqueeze(0).flatten(0, -2)


library.register_autograd(
    "foo::linear_int8",
    backward,
    setup_context=setup_context_of_integers,
    composite=composite_int8,
)
library.register_autograd(
    "foo::linear_int4",
    backward,
    setup_context=setup_context_of_integers,
    composite=composite_int4,
)


# ------------------------------------------------------- sharding, vmap, autocast, FLOPs, for both


@library.register_sharding("foo::linear_int8")
def int8_sharding(
    input: Any,
    weight: Any,
    scale: Any,
    bias: Any = None,
    *,
    activations: int | None = None,
    by_section: bool = False,
) -> str:
    # Sharded along k, each process would add the bias, and round its part of a row or a section.
    rounds_rows = by_section or (activations is not None and len(scale.shape) == 1)
    k = "k" if bias is None and not rounds_rows else "."
    of_bias = "." if bias is None else "n"
    of_scale = f"n {k}" if len(scale.shape) == 2 else "n"
    return f"... {k}, n {k}, {of_scale}, {of_bias} -> ... n"


@library.register_sharding("foo::linear_int4")
def int4_sharding(
    input: Any,
    weight: Any,
    scale: Any,
    zero: Any,
    bias: Any = None,
    *,
    by_section: bool = False,
    **_: Any,
) -> str:
    if bias is None and not by_section:
        return "... k, n k, n k, n k, . -> ... n"
    return f"... ., n ., n ., n ., {'.' if bias is None else 'n'} -> ... n"


for _name in ("foo::linear_int8", "foo::linear_int4"):
    library.register_vmap_rows(_name, "input")
    library.register_nested_rows(_name, "input")
    library.register_autocast(_name)


@library.register_flops("foo::linear_int8", "foo::linear_int4")
def flops(input_shape: torch.Size, weight_shape: torch.Size, *others: Any, **_: Any) -> int:
    """Count one matrix product, without scale, zero and bias."""
    return product_flops(input_shape, weight_shape[0])
