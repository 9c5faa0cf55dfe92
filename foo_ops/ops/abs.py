"""foo::abs, the absolute value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import library

library.define("foo::abs", "(Tensor input) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
library.define(
    "foo::abs_",
    "(Tensor(a!) input) -> Tensor(a!)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.inplace),
)
library.define(
    "foo::abs.out",
    "(Tensor input, *, Tensor(a!) out) -> Tensor(a!)",
    tags=torch.Tag.pt2_compliant_tag,
)

REAL_TYPES = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
COMPLEX_TYPES = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def abs(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The absolute value of each element; for complex numbers the modulus.

    Args:
        input: of any shape, strides, and any integer, floating-point or complex dtype.
        out: where to write the result. It is resized if its shape differs; its dtype must be one
            that the result can be cast to.

    Returns:
        A tensor of input's shape and memory format, and of its dtype; of the dtype of one part if
        input is complex. The gradient is ``grad * sgn(input)``: at zero it is zero.

    Raises:
        TypeError: for bool and other dtypes that are not numbers.

    Example:
        >>> foo_ops.abs(torch.tensor([-1.0, 0.0, 2.5]))
        tensor([1.0000, 0.0000, 2.5000])
        >>> foo_ops.abs(torch.tensor([3 + 4j]))
        tensor([5.])
    """
    if out is None:
        return torch.ops.foo.abs.default(input)
    return torch.ops.foo.abs.out(input, out=out)


REAL_TO_REAL = {dtype: dtype for dtype in REAL_TYPES}
for name in ("foo::abs", "foo::abs.out"):
    library.register_elementwise(
        name,
        "abs",
        REAL_TO_REAL | COMPLEX_TYPES,
        inputs="an integer, floating-point or complex dtype",
    )
# The modulus of a complex number is real and cannot take its place.
library.register_elementwise(
    "foo::abs_", "abs", REAL_TO_REAL, inputs="an integer or floating-point dtype"
)


def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> Tensor:
    """For complex input the conjugate Wirtinger derivative, as everywhere in torch."""
    (input,) = ctx.saved_tensors
    return grad * input.sgn()


library.register_autograd("foo::abs", backward, setup_context=setup_context)
for name in ("foo::abs_", "foo::abs.out"):
    library.register_variant_autograd(name)
