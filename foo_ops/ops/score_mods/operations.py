"""What each of PyTorch's operations on numbers is in a program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.kernels.flex.program import COMPARISONS, FUNCTIONS
from foo_ops.ops.score_mods.recorder import Part, Recorder, example, unsupported, wide

aten = torch.ops.aten

# What an operation is: a node, from the recorder, the result's dtype and the operation's arguments.
Operation = Callable[..., int]
OPERATIONS: dict[Any, Operation] = {}
PARTS: dict[Any, Callable[..., Part]] = {}


def operation(*packets: Any) -> Callable[[Operation], Operation]:
    """Say what operations are, by those in place, too."""

    def register(function: Operation) -> Operation:
        for packet in packets:
            OPERATIONS[packet] = function
            in_place = getattr(aten, f"{packet.__name__}_", None)
            if in_place is not None:
                OPERATIONS[in_place] = function
        return function

    return register


def compute(recorder: Recorder, dtype: torch.dtype, name: str, *arguments: Any) -> int:
    """Return an operation of a program on arguments of the result's dtype."""
    operands = (recorder.operand(it, dtype) for it in arguments)
    return recorder.builder.add(wide(dtype), name, *operands)


def common(one: Any, other: Any) -> torch.dtype:
    """Return the dtype in which two arguments are compared."""
    return torch.result_type(example(one), example(other))


def _register_by_name() -> None:
    """Register what has one name in programs and in PyTorch."""
    for name in FUNCTIONS:
        operation(getattr(aten, name))(functools.partial(_function, name=name))
    for name in COMPARISONS:
        operation(getattr(aten, name))(functools.partial(_comparison, name=name))
    arithmetic = {
        **{name: name for name in ("mul", "minimum", "maximum", "remainder", "fmod")},
        **{f"bitwise_{name}": name for name in ("and", "or", "xor")},
        **{f"__{name}__": name for name in ("and", "or", "xor")},
        **dict.fromkeys(("__lshift__", "bitwise_left_shift"), "shift_left"),
        **dict.fromkeys(("__rshift__", "bitwise_right_shift"), "shift_right"),
        "floor_divide": "floor_divide",
    }
    for packet, name in arithmetic.items():
        operation(getattr(aten, packet))(functools.partial(_arithmetic, name=name))
    for name in ("neg", "abs", "sign"):
        operation(getattr(aten, name))(functools.partial(_arithmetic, name=name))
    operation(aten.sgn)(functools.partial(_arithmetic, name="sign"))
    for name in ("and", "or", "xor"):
        operation(getattr(aten, f"logical_{name}"))(functools.partial(_logical, name=name))


def _function(r: Recorder, dtype: torch.dtype, x: Any, *, name: str, decimals: int = 0) -> int:
    if decimals:
        raise unsupported(f"torch.round with decimals={decimals}")
    if not dtype.is_floating_point:
        return r.operand(x, dtype)
    return compute(r, dtype, name, x)


def _comparison(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, name: str) -> int:
    operands = (r.operand(it, common(x, y)) for it in (x, y))
    return r.builder.add(torch.bool, name, *operands)


def _arithmetic(r: Recorder, dtype: torch.dtype, *arguments: Any, name: str) -> int:
    return compute(r, dtype, name, *arguments)


def _logical(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, name: str) -> int:
    return compute(r, torch.bool, name, x, y)


_register_by_name()


@operation(aten.add)
def _add(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, alpha: Any = 1) -> int:
    return _sum(r, dtype, "add", x, y, alpha)


@operation(aten.sub)
def _sub(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, alpha: Any = 1) -> int:
    return _sum(r, dtype, "sub", x, y, alpha)


@operation(aten.rsub)
def _rsub(r: Recorder, dtype: torch.dtype, x: Any, y: Any, alpha: Any = 1) -> int:
    return _sum(r, dtype, "sub", y, x, alpha)


def _sum(r: Recorder, dtype: torch.dtype, name: str, x: Any, y: Any, alpha: Any) -> int:
    if dtype == torch.bool:
        return compute(r, dtype, "or", x, y)
    first, second = r.operand(x, dtype), r.operand(y, dtype)
    if alpha != 1:
        second = r.builder.add(wide(dtype), "mul", second, r.operand(alpha, dtype))
    return r.builder.add(wide(dtype), name, first, second)


@operation(aten.div, aten.divide)
def _div(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, rounding_mode: Any = None) -> int:
    names = {None: "div", "floor": "floor_divide", "trunc": "trunc_divide"}
    return compute(r, dtype, names[rounding_mode], x, y)


@operation(aten.reciprocal)
def _reciprocal(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    return _one_over(r, dtype, r.operand(x, dtype))


@operation(aten.rsqrt)
def _rsqrt(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    return _one_over(r, dtype, compute(r, dtype, "sqrt", x))


@operation(aten.sigmoid)
def _sigmoid(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    dtype, add = wide(dtype), r.builder.add
    exponential = add(dtype, "exp", add(dtype, "neg", r.operand(x, dtype)))
    one = r.builder.constant(1, dtype)
    return _one_over(r, dtype, add(dtype, "add", one, exponential))


def _one_over(r: Recorder, dtype: torch.dtype, node: int) -> int:
    dtype = wide(dtype)
    return r.builder.add(dtype, "div", r.builder.constant(1, dtype), node)


@operation(aten.tanh_backward)
def _tanh_backward(r: Recorder, dtype: torch.dtype, grad: Any, result: Any) -> int:
    dtype, add = wide(dtype), r.builder.add
    one, node = r.builder.constant(1, dtype), r.operand(result, dtype)
    slope = add(dtype, "sub", one, add(dtype, "mul", node, node))
    return add(dtype, "mul", r.operand(grad, dtype), slope)


@operation(aten.sigmoid_backward)
def _sigmoid_backward(r: Recorder, dtype: torch.dtype, grad: Any, result: Any) -> int:
    dtype, add = wide(dtype), r.builder.add
    one, node = r.builder.constant(1, dtype), r.operand(result, dtype)
    slope = add(dtype, "mul", node, add(dtype, "sub", one, node))
    return add(dtype, "mul", r.operand(grad, dtype), slope)


@operation(aten.threshold_backward)
def _threshold_backward(
    r: Recorder, dtype: torch.dtype, grad: Any, result: Any, threshold: Any
) -> int:
    node = r.operand(result, dtype)
    small = r.builder.add(torch.bool, "le", node, r.operand(threshold, dtype))
    return _choose(r, dtype, small, r.builder.constant(0, wide(dtype)), r.operand(grad, dtype))


@operation(aten.square)
def _square(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    node = r.operand(x, dtype)
    return r.builder.add(wide(dtype), "mul", node, node)


@operation(aten.relu)
def _relu(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    zero = r.builder.constant(0, wide(dtype))
    return r.builder.add(wide(dtype), "maximum", r.operand(x, dtype), zero)


@operation(aten.clamp, aten.clip)
def _clamp(r: Recorder, dtype: torch.dtype, x: Any, low: Any = None, high: Any = None) -> int:
    node = r.operand(x, dtype)
    for name, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            node = r.builder.add(wide(dtype), name, node, r.operand(bound, dtype))
    return node


@operation(aten.clamp_min)
def _clamp_min(r: Recorder, dtype: torch.dtype, x: Any, low: Any) -> int:
    return _clamp(r, dtype, x, low)


@operation(aten.clamp_max)
def _clamp_max(r: Recorder, dtype: torch.dtype, x: Any, high: Any) -> int:
    return _clamp(r, dtype, x, None, high)


@operation(aten.pow)
def _pow(r: Recorder, dtype: torch.dtype, x: Any, exponent: Any) -> int:
    """Small powers are products: 2, 3, 0.5 and -1 of floats, those up to 8 of integers."""
    add, kind = r.builder.add, wide(dtype)
    if not isinstance(exponent, Tensor) and isinstance(x, Tensor):
        if exponent in (2, 3) or (not dtype.is_floating_point and 1 <= exponent <= 8):
            node = r.operand(x, dtype)
            times = (node for _ in range(int(exponent)))
            return functools.reduce(lambda one, other: add(kind, "mul", one, other), times)
        if exponent == 1:
            return r.operand(x, dtype)
        if exponent == 0.5:
            return compute(r, dtype, "sqrt", x)
        if exponent == -1 and dtype.is_floating_point:
            return _reciprocal(r, dtype, x)
    if not dtype.is_floating_point:
        raise unsupported("torch.pow of integers")
    return compute(r, dtype, "pow", x, exponent)


@operation(aten.where)
def _where(r: Recorder, dtype: torch.dtype, condition: Any, x: Any, y: Any) -> int:
    return _choose(
        r, dtype, r.operand(condition, torch.bool), r.operand(x, dtype), r.operand(y, dtype)
    )


@operation(aten.masked_fill)
def _masked_fill(r: Recorder, dtype: torch.dtype, x: Any, mask: Any, value: Any) -> int:
    return _where(r, dtype, mask, value, x)


def _choose(r: Recorder, dtype: torch.dtype, condition: int, x: int, y: int) -> int:
    return r.builder.add(wide(dtype), "where", condition, x, y)


@operation(aten.logical_not)
def _logical_not(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    return compute(r, torch.bool, "not", x)


@operation(aten.bitwise_not)
def _bitwise_not(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    return compute(r, dtype, "not", x)


@operation(aten.isnan)
def _isnan(r: Recorder, dtype: torch.dtype, x: Tensor) -> int:
    return _comparison(r, dtype, x, x, name="ne")


@operation(aten.isinf)
def _isinf(r: Recorder, dtype: torch.dtype, x: Tensor) -> int:
    if not x.dtype.is_floating_point:
        return r.builder.constant(False, torch.bool)
    size = compute(r, x.dtype, "abs", x)
    return r.builder.add(torch.bool, "eq", size, r.builder.constant(math.inf, wide(x.dtype)))


@operation(aten._to_copy, torch.ops.prims.convert_element_type)
def _cast(r: Recorder, dtype: torch.dtype, /, x: Any, *arguments: Any, **options: Any) -> int:
    """Round to 16 bits where a function asks for them, and compute in float32 again.

    What an operation is made of, and gradients, are not rounded.
    """
    node = r.operand(x, dtype)
    rounded = node if r.may_write else r.builder.add(dtype, "cast", node)
    return r.builder.add(wide(dtype), "cast", rounded)


@operation(aten.ones_like, aten.new_ones)
def _ones(r: Recorder, dtype: torch.dtype, /, *arguments: Any, **options: Any) -> int:
    return r.builder.constant(1, wide(dtype))


@operation(aten.zeros_like, aten.new_zeros, aten.empty_like, aten.new_empty)
def _zeros(r: Recorder, dtype: torch.dtype, /, *arguments: Any, **options: Any) -> int:
    return r.builder.constant(0, wide(dtype))


@operation(aten.full_like)
def _full_like(r: Recorder, dtype: torch.dtype, /, x: Any, value: Any, **options: Any) -> int:
    return r.operand(value, dtype)


@operation(aten.new_full)
def _new_full(
    r: Recorder, dtype: torch.dtype, /, x: Any, size: Any, value: Any, **options: Any
) -> int:
    return r.operand(value, dtype)


@operation(aten.fill)
def _fill(r: Recorder, dtype: torch.dtype, x: Any, value: Any) -> int:
    return r.operand(value, dtype)


@operation(
    *(aten.alias, aten.detach, aten.clone, aten.lift_fresh, aten.sum),
    *(aten.view, aten._unsafe_view, aten.reshape, aten.expand),
    *(aten.squeeze, aten.unsqueeze, aten.permute, aten.conj_physical, aten.positive),
)
def _same(r: Recorder, dtype: torch.dtype, /, x: Any, *arguments: Any, **options: Any) -> int:
    """A number is the same in another shape of one element."""
    return r.operand(x, dtype)


def part(*packets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say which part of a captured tensor operations read."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PARTS.update(dict.fromkeys(packets, function))
        return function

    return register


@part(aten.index)
def _index(r: Recorder, tensor: Tensor, indices: Sequence[Tensor | None]) -> Part:
    nodes = [None if it is None else r.operand(it, it.dtype) for it in indices]
    if len(nodes) > tensor.dim():
        raise unsupported(f"{len(nodes)} indices for {tensor.dim()} dimensions")
    return r.part_of(tensor).indexed(nodes)


@part(aten.select)
def _select(r: Recorder, tensor: Tensor, dim: int, index: int) -> Part:
    node = r.operand(index, torch.int64)
    return r.part_of(tensor).indexed([None] * (dim % tensor.dim()) + [node])


@part(aten.embedding)
def _embedding(r: Recorder, weight: Tensor, index: Tensor, *options: Any) -> Part:
    return _index(r, weight, [index])
