"""Inputs of scaled_dot_product_attention, and the operators it runs."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foo_ops.testing import reference


def heads_in_front(*shape):
    """Make (batch, heads, length, head_dim) as a transposed (batch, length, heads, head_dim)."""
    batch, heads, length, size = shape
    return torch.randn(batch, length, heads, size, dtype=torch.float64).transpose(1, 2)


def some_keys(*shape):
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


class Operators(TorchDispatchMode):
    """Records which operators run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def on_foo(tensor, dtype=None):
    """Make a leaf on foo with the strides of ``tensor``."""
    return (
        tensor.to("foo", dtype if tensor.is_floating_point() else None)
        .detach()
        .requires_grad_(tensor.is_floating_point())
    )


def expected_of(inputs, options, cotangent, **more):
    """Return output and gradients of the float64 formula, for the inputs as foo got them."""
    options = {name: value for name, value in options.items() if name != "enable_gqa"}
    mask = options.pop("attn_mask", None)
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().cpu().double().requires_grad_()
        leaves.append(mask)
    output, _ = reference.attention(
        *leaves[:3], None if mask is None else mask.cpu(), **options, **more
    )
    return output, torch.autograd.grad(output, leaves, cotangent.cpu().double())
