"""Flex attention under the transforms of torch.func, whatever its functions capture."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import foo_ops
from foo_ops.ops.flex_attention.trace import trace

DTYPE = torch.float64
STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)


def causal(b, h, q, k):
    return q >= k


def rows_that_differ(b, h, q, k):
    return q + b >= k


def ours(query, slopes, table, block_mask=causal):
    """Transform the table before use, and read one element at a constant place."""

    def score_mod(score, b, h, q, k):
        return torch.tanh(score) * slopes[h] + (2 * table).T[k, q] * table[0, 1]

    return foo_ops.flex_attention(query, query.sin(), query.cos(), score_mod, block_mask)


def dense(query, slopes, table, block_mask=causal):
    batch, head, row, column = (
        torch.arange(size).view([-1 if at == axis else 1 for at in range(4)])
        for axis, size in enumerate((*query.shape[:3], query.shape[2]))
    )
    scores = torch.tanh(query @ query.sin().mT / query.shape[-1] ** 0.5)
    scores = scores * slopes[:, None, None] + 2 * table * table[0, 1]
    if block_mask is not None:
        sees = block_mask(batch, head, row, column)
        scores = scores.masked_fill(~sees.to(scores.device), -torch.inf)
    return scores.softmax(-1) @ query.cos()


def packed(query, slopes, table):
    """The same for two packed sequences: (total, H, D)."""
    starts = STARTS.to(query.device)
    return foo_ops.flex_attention_varlen(
        *(query, query.sin(), query.cos(), starts, starts),
        lambda score, b, h, q, k: torch.tanh(score) * slopes[h] + (2 * table).T[k, q] * table[0, 1],
        causal,
        max_seqlen_q=3,
        max_seqlen_k=3,
    )


def dense_packed(query, slopes, table):
    outputs = []
    for start, stop in ((0, 2), (2, 5)):
        own = query[start:stop].transpose(0, 1).unsqueeze(0)
        length = stop - start
        bias = table[:length, :length]
        scores = torch.tanh(own @ own.sin().mT / own.shape[-1] ** 0.5) * slopes[:, None, None]
        scores = scores + 2 * bias * table[0, 1]
        scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
        outputs.append((scores.softmax(-1) @ own.cos()).squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


SHAPES = {"dense": (1, 2, 3, 4), "packed": (5, 2, 4)}
FUNCTIONS = {"dense": (ours, dense), "packed": (packed, dense_packed)}
ALL = (0, 1, 2)


def scalar(function):
    return lambda *inputs: function(*inputs).square().sum()


def vjp(function):
    def transformed(*inputs):
        output, pull_back = torch.func.vjp(function, *inputs)
        return pull_back(torch.cos(output.detach()))

    return transformed


def jvp(function):
    return lambda *inputs: torch.func.jvp(function, inputs, tuple(map(torch.cos, inputs)))[1]


def mapped(function, *places):
    """Map the arguments at these places."""

    def transformed(*inputs):
        given = [
            torch.stack([it, 2 * it, -it], -1) if place in places else it
            for place, it in enumerate(inputs)
        ]
        in_dims = tuple(-1 if place in places else None for place in range(len(inputs)))
        return torch.func.vmap(function, in_dims=in_dims)(*given)

    return transformed


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(scalar(f), argnums=ALL),
    "vjp": vjp,
    "jvp": jvp,
    "jacrev": lambda f: torch.func.jacrev(f, argnums=ALL),
    "jacfwd": lambda f: torch.func.jacfwd(f, argnums=ALL),
    "hessian": lambda f: torch.func.hessian(scalar(f), argnums=ALL),
    "jvp of grad": lambda f: jvp(lambda *it: torch.func.grad(scalar(f), argnums=ALL)(*it)[1]),
    "vmap": lambda f: mapped(f, *ALL),
    "vmap of query": lambda f: mapped(f, 0),
    "vmap of captured": lambda f: mapped(f, 1, 2),
    "vmap of vmap": lambda f: mapped(mapped(f, 1), 0),
    "vmap of grad": lambda f: mapped(torch.func.grad(scalar(f), argnums=ALL), 0, 2),
    "vmap of grad of query": lambda f: mapped(torch.func.grad(scalar(f)), 0),
}


def inputs_of(kind, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    shapes = (SHAPES[kind], (2,), (3, 3))
    return [torch.randn(it, dtype=DTYPE, generator=generator).to(device) for it in shapes]


def close(actual, expected):
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (actual, expected)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.cpu(), other, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_transform(device, kind, transform):
    one, other = FUNCTIONS[kind]
    make = TRANSFORMS[transform]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        actual = make(one)(*inputs_of(kind, device))
    close(actual, make(other)(*inputs_of(kind)))


def test_tangents_of_captured_tensors(device):
    def tangents(function, *inputs):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(it, it.cos()) for it in inputs]
            return forward_ad.unpack_dual(function(*duals)).tangent

    close(tangents(ours, *inputs_of("dense", device)), tangents(dense, *inputs_of("dense")))


class Calls(TorchDispatchMode):
    """Counts the calls that reach operators of flex attention."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "flex_attention" in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def calls(function, *inputs):
    """Return the result, and the names of the operators called with traced programs."""
    with Calls() as counted:
        return function(*inputs), [it.removeprefix("flex_attention") for it in counted.names]


ONCE, GRADIENTS = [".default"], [".default", "_backward.default"]


@pytest.mark.parametrize(
    ("block_mask", "places", "once"),
    [
        (None, (0,), True),
        (causal, (0,), True),
        (rows_that_differ, (0,), False),
        (causal, (0, 1), False),
    ],
)
def test_calls(block_mask, places, once):
    def attend(*given):
        return ours(*given, block_mask)

    def expected(*given):
        return dense(*given, block_mask)

    inputs = inputs_of("dense")
    inputs[0] = torch.cat((inputs[0], inputs[0].sin()))
    for make, names in ((lambda f: f, ONCE), (lambda f: torch.func.grad(scalar(f)), GRADIENTS)):
        actual, called = calls(mapped(make(attend), *places), *inputs)
        assert len(called) == len(names) * (1 if once else 3)
        close(actual, mapped(make(expected), *places)(*inputs))


@pytest.mark.parametrize("batch", [None, 2])
def test_lists_of_blocks(batch):
    inputs = inputs_of("dense")
    inputs[0] = torch.randn(2, 2, 3, 4, dtype=DTYPE)
    mask = create_block_mask(causal, batch, None, 3, 3, device="cpu", BLOCK_SIZE=2)
    attend = mapped(lambda query: ours(query, *inputs[1:], mask), 0)
    actual, called = calls(attend, inputs[0])
    assert called == ONCE * (1 if batch is None else 3)
    close(actual, mapped(lambda query: dense(query, *inputs[1:]), 0)(inputs[0]))


def test_captured_are_the_objects_of_the_function():
    seen = []

    def call(slopes):
        function = lambda score, b, h, q, k: score * slopes[h]  # noqa: E731
        seen.append(trace(function, None, torch.empty(0)).captured[0] is slopes)
        return slopes.sum()

    torch.func.vmap(torch.func.grad(call))(torch.ones(2, 3))
    assert seen == [True]


def test_a_mapped_dimension_without_elements():
    query, slopes, table = inputs_of("dense")
    queries = query.expand(0, *query.shape)
    assert torch.vmap(lambda it: ours(it, slopes, table))(queries).shape == (0, 1, 2, 3, 4)
    tables = table.expand(0, 3, 3)
    gradient = torch.func.grad(lambda it: ours(query, slopes, it).sum())
    assert torch.vmap(gradient)(tables).shape == (0, 3, 3)
