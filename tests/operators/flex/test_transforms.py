"""Flex attention under the transforms of torch.func, and its second derivatives."""

import pytest
import torch

import foo_ops

DTYPE = torch.float64
STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)


def score_mod(score, b, h, q, k):
    return torch.tanh(score) + 0.5 * h - 0.25 * (q - k).abs()


def causal(b, h, q, k):
    return q >= k


def math_flex_attention(x):
    heads, queries, keys = (torch.arange(size) for size in (*x.shape[1:3], x.shape[2]))
    places = (heads[:, None, None], queries[:, None], keys)
    scores = score_mod(x @ x.mT / x.shape[-1] ** 0.5, 0, *places)
    return scores.masked_fill(~causal(0, *places), -torch.inf).softmax(-1) @ x


def ours_packed(x):
    starts = STARTS.to(x.device)
    return foo_ops.flex_attention_varlen(
        x, x, x, starts, starts, score_mod, causal, max_seqlen_q=3, max_seqlen_k=3
    )


def math_packed(x):
    pieces = [x[start:end].transpose(0, 1) for start, end in ((0, 2), (2, 5))]
    return torch.cat([math_flex_attention(it[None])[0].transpose(0, 1) for it in pieces])


# Shapes of the inputs, the operator, and its equivalent in torch's own operators.
OPERATORS = {
    "flex_attention": (
        (1, 2, 3, 2),
        lambda x: foo_ops.flex_attention(x, x, x, score_mod, causal),
        math_flex_attention,
    ),
    "flex_attention_varlen": ((5, 2, 2), ours_packed, math_packed),
}


def scalar(function):
    return lambda x: function(x).square().sum()


def vjp(function):
    def transformed(x):
        output, pull_back = torch.func.vjp(function, x)
        return pull_back(torch.cos(output.detach()))[0]

    return transformed


def of_gradients(function):
    """Differentiate a gradient."""

    def transformed(x):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(scalar(function)(x), x, create_graph=True)
        return torch.autograd.grad(grad.sin().sum(), x)[0]

    return transformed


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(scalar(f)),
    "vjp": vjp,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.cos(x),))[1],
    "jacfwd": torch.func.jacfwd,
    "second derivatives": of_gradients,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OPERATORS)
def test_transform(name, transform, device):
    shape, ours, theirs = OPERATORS[name]
    x = torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(3))
    make = TRANSFORMS[transform]
    actual = make(ours)(x.to(device))
    assert actual.device.type == device
    torch.testing.assert_close(actual.cpu(), make(theirs)(x), atol=1e-12, rtol=1e-10)
