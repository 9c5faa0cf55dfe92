"""foo::rotary_embedding turns positions into rotations (Su et al. 2021, equation 34)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.library.operators import either, holds
from foo_ops.ops.arguments import (
    compute_type,
    require_compute_type,
    require_device,
    require_floating,
    require_rows,
    require_shape,
)

# ------------------------------------------------------------------------------------------ indices

# Find elements of arrays with any number of dimensions and any strides.


def offset_of(view: Any, of: Any, number: Any, trailing: Any) -> Any:
    """Return the offset of an element of a view, by its number in row-major order.

    Args:
        view: a view that is broadcast over the leading dimensions of ``of``.
        of: the view whose elements are counted; it may be ``view`` itself.
        number: counts over all dimensions of ``of`` but the trailing ones.
        trailing: the number of trailing dimensions.
    """
    offset = 0
    for back in range(trailing + 1, of.ndim + 1):
        index = number % of.shape[-back]
        number = number // of.shape[-back]
        if back <= view.ndim and view.shape[-back] > 1:
            offset += index * view.strides[-back]
    return offset


# ------------------------------------------------------------------------------------- the operator

# A pair of elements (a, b) of a row is rotated by an angle: (a cos - b sin, a sin + b cos).


# inverse: rotate by the negative angles, as the gradient does.
ARGUMENTS = "Tensor cosine, Tensor sine, *, bool interleaved=False, bool inverse=False"
library.define(
    "foo::rotary_embedding",
    f"(Tensor input, {ARGUMENTS}) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
library.define(
    "foo::rotary_embedding_",
    f"(Tensor(a!) input, {ARGUMENTS}) -> Tensor(a!)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.inplace),
)
library.define(
    "foo::rotary_embedding_backward",
    f"(Tensor grad_output, {ARGUMENTS}) -> Tensor grad_input",
    tags=torch.Tag.pt2_compliant_tag,
)


def rotary_embedding(
    input: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: bool = False,
    inplace: bool = False,
) -> Tensor:
    """Rotate pairs of elements by the angles of their positions.

    Args:
        input: (..., D), query or key, floating-point, any strides. float16 and bfloat16 are
            computed in float32 and rounded once.
        cosine, sine: (..., R / 2), of one shape, floating-point (float64 if input is, and only
            then), whose leading dimensions broadcast to those of input: (S, R / 2) for input
            (B, H, S, D), and (S, 1, R / 2) for (B, S, H, D). The first R <= D elements of a row
            are rotated, the others stay.
        interleaved: the pairs are (0, 1), (2, 3) ... as in GPT-J; otherwise (0, R / 2),
            (1, R / 2 + 1) ... as in GPT-NeoX and Llama.
        inplace: write to input, and return it.

    Returns:
        A contiguous tensor of input's shape and dtype. Has gradients for all tensors.

    Raises:
        ValueError, TypeError: for shapes and dtypes that do not fit.

    Example:
        >>> angle = torch.tensor([torch.pi / 2, 0.0])
        >>> query = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> foo_ops.rotary_embedding(query, angle.cos(), angle.sin()).round()
        tensor([-3.,  2.,  1.,  4.])
    """
    function = torch.ops.foo.rotary_embedding_ if inplace else torch.ops.foo.rotary_embedding
    return function(input, cosine, sine, interleaved=interleaved)


# ----------------------------------------------------------------------------------------- kernel


def step_of(view: Any) -> Any:
    """Return the stride of the second-last dimension, or 0 if it has one element or is missing."""
    return view.strides[-2] if view.ndim > 1 and view.shape[-2] > 1 else 0


def turn_halves(
    x: Any, x0: Any, c: Any, c0: Any, s: Any, s0: Any, half: Any, sign: Any, y: Any, y0: Any
) -> None:
    """Rotate the pairs (i, half + i) of a row, from x at x0 to y at y0.

    Uses explicit vectors: LLVM's would check for each row whether x and y overlap, which takes as
    long as to rotate 64 elements.
    """
    step = language.lanes(x)
    whole = half - half % step
    for i in range(0, whole, step):
        a = language.load_vector(x, x0 + i, step)
        b = language.load_vector(x, x0 + half + i, step)
        cosine = language.load_vector(c, c0 + i, step)
        sine = language.load_vector(s, s0 + i, step) * language.splat(sign, step)
        language.store(y, y0 + i, a * cosine - b * sine)
        language.store(y, y0 + half + i, b * cosine + a * sine)
    for i in range(whole, half):
        cosine = language.load(c, c0 + i)
        sine = language.load(s, s0 + i) * sign
        turn_pair(x, x0 + i, x0 + half + i, cosine, sine, y, y0 + i, y0 + half + i)


def turn_neighbours(
    x: Any, x0: Any, c: Any, c0: Any, s: Any, s0: Any, half: Any, sign: Any, y: Any, y0: Any
) -> None:
    """Rotate the pairs (2 i, 2 i + 1) of a row."""
    for i in range(half):
        first, second = 2 * i, 2 * i + 1
        cosine = language.load(c, c0 + i)
        sine = language.load(s, s0 + i) * sign
        turn_pair(x, x0 + first, x0 + second, cosine, sine, y, y0 + first, y0 + second)


def turn_pair(
    x: Any, first: Any, second: Any, cosine: Any, sine: Any, y: Any, to_first: Any, to_second: Any
) -> None:
    a, b = language.load(x, first), language.load(x, second)
    language.store(y, to_first, a * cosine - b * sine)
    language.store(y, to_second, b * cosine + a * sine)


def turn_rows(
    input: Any, cosine: Any, sine: Any, interleaved: Any, inverse: Any, output: Any, rows: Any,
    is_in_place: Any,
) -> None:  # fmt: skip
    size, half = input.shape[-1], cosine.shape[-1]
    x, y, c, s = input.data, output.data, cosine.data, sine.data
    sign = language.cast(-1 if inverse else 1, input)
    left = x0 = y0 = c0 = s0 = 0
    for row in rows:
        if left == 0:
            # Divide indices once for all rows that differ in the last index only.
            left = input.shape[-2] - row % input.shape[-2] if input.ndim > 1 else 1
            x0, y0 = offset_of(input, input, row, 1), offset_of(output, input, row, 1)
            c0, s0 = offset_of(cosine, input, row, 1), offset_of(sine, input, row, 1)
        if is_in_place:
            # Shows the compiler that elements are written where they were read.
            y0 = x0
        if interleaved:
            turn_neighbours(x, x0, c, c0, s, s0, half, sign, y, y0)
        else:
            turn_halves(x, x0, c, c0, s, s0, half, sign, y, y0)
        for i in range(2 * half, size):
            language.store(y, y0 + i, language.load(x, x0 + i))
        x0, y0 = x0 + step_of(input), y0 + step_of(output)
        c0, s0 = c0 + step_of(cosine), s0 + step_of(sine)
        left -= 1


@library.tile_kernel(contiguous_rows=True)
def kernel(
    input: Any, cosine: Any, sine: Any, interleaved: Any, inverse: Any, output: Any, rows: Any
) -> None:
    turn_rows(input, cosine, sine, interleaved, inverse, output, rows, False)


@library.tile_kernel(contiguous_rows=True)
def backward_kernel(
    grad_output: Any, cosine: Any, sine: Any, interleaved: Any, inverse: Any, output: Any, rows: Any
) -> None:
    turn_rows(grad_output, cosine, sine, interleaved, not inverse, output, rows, False)


@library.tile_kernel(contiguous_rows=True)
def in_place_kernel(
    input: Any, cosine: Any, sine: Any, interleaved: Any, inverse: Any, rows: Any
) -> None:
    turn_rows(input, cosine, sine, interleaved, inverse, input, rows, True)


# ------------------------------------------------------------------------------------------- fake


def check(operator: str, input: Tensor, cosine: Tensor, sine: Tensor) -> None:
    require_device(operator, input=input, cosine=cosine, sine=sine)
    require_floating(operator, input=input, cosine=cosine, sine=sine)
    require_rows(operator, input=input, cosine=cosine)
    require_shape(operator, "sine", sine, cosine.shape, "as cosine has")
    require_compute_type(operator, "input", input, cosine=cosine, sine=sine)
    if not holds(2 * cosine.shape[-1] <= input.shape[-1]):
        raise ValueError(
            f"{operator}: cosine must have a last dimension of at most {input.shape[-1] // 2}, "
            f"half of input's, got {cosine.shape[-1]}"
        )
    leading, target = cosine.shape[:-1], input.shape[:-1]
    aligned = zip(reversed(leading), reversed(target))
    fits = all(holds(either(own == other, own == 1)) for own, other in aligned)
    if len(leading) > len(target) or not fits:
        raise ValueError(
            f"{operator}: cosine must have leading dimensions that broadcast to {list(target)} as "
            f"input has, got {list(leading)}"
        )


@library.register_fake("foo::rotary_embedding")
def fake(
    input: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    check("rotary_embedding", input, cosine, sine)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@library.register_fake("foo::rotary_embedding_")
def fake_in_place(
    input: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    check("rotary_embedding_", input, cosine, sine)
    return input


@library.register_fake("foo::rotary_embedding_backward")
def fake_backward(
    grad_output: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    check("rotary_embedding_backward", grad_output, cosine, sine)
    return torch.empty_like(grad_output, memory_format=torch.contiguous_format)


library.register_kernel("foo::rotary_embedding", ("cpu", "foo"), kernel)
library.register_kernel("foo::rotary_embedding_backward", ("cpu", "foo"), backward_kernel)
library.register_kernel("foo::rotary_embedding_", ("cpu", "foo"), in_place_kernel)


# --------------------------------------------------------------------------------------- autograd


def composite(
    input: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Compute foo::rotary_embedding with torch's own operators, also for gradients of tables."""
    half, compute = cosine.shape[-1], compute_type(input.dtype)
    turned = input[..., : 2 * half].to(compute)
    # Cast before they are broadcast, so that their gradients are summed in the compute type.
    cosine, sine = cosine.to(compute), sine.to(compute)
    # By slices, which DTensor can take of a sharded dimension.
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    if inverse:
        sine = -sine
    pair = (a * cosine - b * sine, b * cosine + a * sine)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(input.dtype), input[..., 2 * half :]), -1)


def composite_backward(
    grad_output: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    return composite(grad_output, cosine, sine, interleaved=interleaved, inverse=not inverse)


# Tables are usually constants. If they need gradients, the composite computes them.
library.register_autograd(
    "foo::rotary_embedding", "foo::rotary_embedding_backward", composite=composite
)
library.register_autograd("foo::rotary_embedding_backward", composite=composite_backward)
library.register_variant_autograd("foo::rotary_embedding_")


# --------------------------------------------------------------------------- vmap, sharding, FLOPs

library.register_vmap_rows("foo::rotary_embedding", "input")
library.register_vmap_rows("foo::rotary_embedding_backward", "grad_output")

for name in ("rotary_embedding", "rotary_embedding_", "rotary_embedding_backward"):
    # The tables are broadcast.
    library.register_sharding(f"foo::{name}", "... ., ... ., ... . -> ... .")


@library.register_flops(
    "foo::rotary_embedding", "foo::rotary_embedding_", "foo::rotary_embedding_backward"
)
def flops(input_shape: torch.Size, cosine_shape: torch.Size, *others: Any, **_: Any) -> int:
    """Count four products and two sums for each pair that is rotated."""
    return 6 * math.prod(input_shape[:-1]) * cosine_shape[-1]
