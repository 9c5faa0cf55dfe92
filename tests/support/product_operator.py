"""Define a correct operator in Python, and run check_operator on broken variants of it."""

import itertools
import re

import pytest
import torch

from foo_ops.testing import (
    OperatorCheckError,
    OpSpec,
    Sample,
    check_operator,
    random,
)

NAMES = map("op{}".format, itertools.count())


PRODUCT = "(Tensor a, Tensor b) -> Tensor"


FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def define(kernel, schema=PRODUCT, *, fake, name=None, tags=()):
    """Define a new operator in the namespace ``broken``, with a kernel for both devices."""
    name = name or next(NAMES)
    torch.library.define(f"broken::{name}", schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.impl(f"broken::{name}", ("cpu", "foo"), kernel)
    if fake is not None:
        torch.library.register_fake(f"broken::{name}", fake)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.broken, packet), overload or "default")


def remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def product(a, b):
    """Multiply as the correct kernel does: results are contiguous, whatever the strides."""
    return (a * b).contiguous()


def empty_product(a, b):
    return torch.empty(a.shape, dtype=a.dtype, device=a.device)


def product_backward(ctx, grad):
    a, b = ctx.saved_tensors
    return grad * b, grad * a


def pair(dtype, size):
    return Sample(tuple(random("pair", (size, 3), (size, 3), dtype=dtype)))


def spec_of(operator, **changes):
    attributes = {
        "operator": operator,
        "reference": torch.mul,
        "dtypes": FLOATS,
        "sized": pair,
        "sizes": (0, 7),
    }
    return OpSpec(**(attributes | changes))


def product_spec(kernel=product, *, fake=empty_product, backward=product_backward, **changes):
    """Make the spec of a * b; each argument replaces a part by a broken one."""
    operator = define(kernel, fake=fake)
    if backward is not None:
        torch.library.register_autograd(operator, backward, setup_context=remember)
    return spec_of(operator, **({"differentiable": backward is not None} | changes))


def failures_of(spec, checks=None):
    """Return the messages of the failing cases, by case id."""
    with pytest.raises(OperatorCheckError) as caught:
        check_operator(spec, checks=checks)
    return {case.id: str(error) for case, error in caught.value.failures}


def require_message(spec, check, message):
    messages = failures_of(spec, [check])
    assert any(re.search(message, text, re.DOTALL) for text in messages.values()), messages
