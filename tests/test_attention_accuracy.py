"""How exact foo::attention is beside torch's own operators in the same dtype.

Each error is measured against closed formulas in float64 (tests/attention_exact.py), and torch's
in the same test: ours may be ``ROOM`` times it, and what a few roundings of the dtype come to.
"""

import numpy as np
import pytest
import torch
from attention_exact import exact_attention, relative_error

import foo_ops
from foo_ops.ops.arguments import compute_type

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROOM = 1.5


def number_for(dtype):
    """What errors of this dtype are measured in."""
    return np.longdouble if dtype == torch.float64 else np.float64


def random(seed, *shapes, dtype, mean=0.0):
    """Of normal distribution, as leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) + mean)
        .to(dtype)
        .requires_grad_()
        for shape in shapes
    ]


# ---------------------------------------------------------------------------------------- soft cap


def capped_by_torch(query, key, value, softcap):
    scores = softcap * torch.tanh(query @ key.mT / query.shape[-1] ** 0.5 / softcap)
    return torch.softmax(scores, -1) @ value


def saturated(dtype, softcap):
    """Inputs whose scores are exact and 8 to 18 times the cap (float64: 20 to 45), with both signs,
    and the scale.

    Of 1 - tanh^2, computed as it stands here, the compute type keeps no digit.
    """
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randint(2, 4, (2, 1, 2, 40, 1), generator=generator).double()
    key[:, :, ::3] *= -1
    value = torch.randn(1, 2, 40, 16, generator=generator, dtype=torch.float64)
    inputs = [t.to(dtype).requires_grad_() for t in (query, key, value)]
    return inputs, (5.0 if dtype == torch.float64 else 2.0) * softcap


@pytest.mark.parametrize("softcap", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_where_the_soft_cap_is_saturated(dtype, softcap, device):
    """The derivative of tanh has all its digits where it is 1e-7 and less, up to those that the
    argument's own rounding leaves it.
    """
    inputs, scale = saturated(dtype, softcap)
    output = foo_ops.attention(*(t.to(device) for t in inputs), softcap=softcap, scale=scale)
    grad_output = torch.randn(output.shape, dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(output, inputs, grad_output.to(device))
    exact = exact_attention(
        inputs,
        (grad_output, torch.zeros(output.shape[:-1])),
        number=number_for(dtype),
        softcap=softcap,
        scale=scale,
    )
    room = 2 * torch.finfo(dtype).eps + 64 * torch.finfo(compute_type(dtype)).eps
    for name, gradient in zip(("query", "key"), gradients):
        assert relative_error(gradient, exact[name]) <= room, name


@pytest.mark.parametrize("softcap", [1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_caps_of_any_size_beside_torch(dtype, softcap, device):
    inputs = random(0, *[(1, 2, 70, 16)] * 3, dtype=dtype)
    output = foo_ops.attention(*(t.to(device) for t in inputs), softcap=softcap)
    grad_output = random(1, output.shape, dtype=dtype)[0].detach()
    ours = (output, *torch.autograd.grad(output, inputs, grad_output.to(device)))
    by_torch = capped_by_torch(*inputs, softcap)
    theirs = (by_torch, *torch.autograd.grad(by_torch, inputs, grad_output))
    exact = exact_attention(
        inputs,
        (grad_output, torch.zeros(output.shape[:-1])),
        number=number_for(dtype),
        softcap=softcap,
    )
    tiny = 4 * torch.finfo(dtype).eps
    for name, own, other in zip(("output", "query", "key", "value"), ours, theirs, strict=True):
        if np.linalg.norm(exact[name].ravel()) > torch.finfo(dtype).tiny:
            error = relative_error(own, exact[name])
            assert error <= ROOM * np.nan_to_num(relative_error(other, exact[name])) + tiny, name
        else:
            assert (own == 0).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("softcap", [1e-3, 1.0])
def test_second_derivatives_where_the_soft_cap_is_saturated(dtype, softcap):
    """Against those of the first derivative's closed formula, by central differences."""
    inputs, scale = saturated(dtype, softcap)
    generator = torch.Generator().manual_seed(2)
    output = foo_ops.attention(*inputs, softcap=softcap, scale=scale)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
    gradient = torch.autograd.grad(output, inputs[0], weights, create_graph=True)[0]
    direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64).to(dtype)
    second = torch.autograd.grad(gradient, inputs[0], direction)[0]

    def first(step):
        query = inputs[0].detach().numpy().astype(np.longdouble)
        query = query + np.longdouble(step) * direction.numpy()
        return exact_attention(
            (query, *inputs[1:]),
            (weights, torch.zeros(output.shape[:-1])),
            number=np.longdouble,
            softcap=softcap,
            scale=scale,
        )["query"]

    step = 1e-6
    expected = (first(step) - first(-step)) / (2 * np.longdouble(step))
    assert relative_error(second, expected) <= 256 * torch.finfo(dtype).eps + 1e-8
