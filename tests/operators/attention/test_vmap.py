"""foo::attention and foo::attention_varlen run under torch.vmap."""

import functools
import re

import pytest
import torch
from support.attention_samples import ONCE, finite, for_each_once

from foo_ops import testing
from foo_ops.testing import ATTENTION, ATTENTION_VARLEN
from foo_ops.testing.spec import random
from foo_ops.testing.specs.attention import random_bias
from foo_ops.testing.specs.attention_varlen import Pages, varlen_sample

pytestmark = pytest.mark.usefixtures("one_thread")

attention = torch.ops.foo.attention


def loop(function, in_dims, *tensors):
    """Compute vmap's result call by call."""
    sizes = {t.shape[dim] for t, dim in zip(tensors, in_dims) if dim is not None}
    (size,) = sizes
    calls = []
    for index in range(size):
        chosen = [t if dim is None else t.select(dim, index) for t, dim in zip(tensors, in_dims)]
        calls.append(function(*chosen))
    return tuple(map(torch.stack, zip(*calls)))


def check_vmap(function, in_dims, *tensors):
    """Compare values, and gradients recorded outside of vmap."""
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    floating = [leaf for leaf in leaves if leaf.requires_grad]
    results = []
    for run in (torch.vmap(function, in_dims), functools.partial(loop, function, in_dims)):
        outputs = run(*leaves)
        cotangents = testing.cotangents_for(outputs)
        results.append((*outputs, *torch.autograd.grad(outputs, floating, cotangents)))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "in_dims",
    [
        *((0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, 0, None)),
        *((1, 2, 3), (-1, 0, 4), (2, None, 1), (4, 4, 4)),
    ],
    ids=str,
)
def test_vmap(in_dims, device):
    """Any of the tensors is mapped over 3 slices, in any dimension."""
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
    tensors = random("vmap", *((3, *shape) for shape in shapes), dtype=torch.float64)
    moved = [
        tensor[0] if dim is None else tensor.movedim(0, dim)
        for tensor, dim in zip(tensors, in_dims)
    ]
    function = functools.partial(attention, is_causal=True, softcap=2.0, window_left=3)
    check_vmap(function, in_dims, *(tensor.to(device) for tensor in moved))


@pytest.mark.parametrize(
    ("shape", "bias_dim"),
    [
        *(((5, 7), dim) for dim in (None, 0, 1, 2)),
        *(((), 0), ((7,), 1), ((4, 1, 7), 0), ((2, 1, 1, 7), 3), ((1, 4, 5, 1), 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("query_dim", [None, 0, 2])
def test_vmap_of_biases(shape, bias_dim, query_dim, device):
    """Biases have a mapped dimension or none, and fewer dimensions than the scores."""
    if bias_dim is None and query_dim is None:
        pytest.skip("nothing to map over")
    query, bias = random("vmap bias", (3, 2, 4, 5, 8), (3, *shape), dtype=torch.float64)
    key, value = random("vmap bias keys", *[(2, 2, 7, 8)] * 2, dtype=torch.float64)
    query = query[0] if query_dim is None else query.movedim(0, query_dim)
    bias = bias[0] if bias_dim is None else bias.movedim(0, bias_dim)
    in_dims = (query_dim, None, None, bias_dim)
    for mask in (bias, bias > 0):
        tensors = (tensor.to(device) for tensor in (query, key, value, mask))
        check_vmap(lambda *inputs: finite(attention(*inputs)), in_dims, *tensors)


def test_vmap_over_a_single_slice(device):
    """A mapped dimension of size 1 differs from one that is broadcast."""
    shapes = (*[(1, 2, 4, 5, 8)] * 3, (1, 2, 1, 5, 5))
    tensors = random("single", *shapes, dtype=torch.float64)
    check_vmap(attention, (0,) * 4, *(tensor.to(device) for tensor in tensors))


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize(
    ("query_dim", "slopes_dim", "sinks_dim"),
    [(0, None, None), (None, 0, None), (None, None, 0), (0, 1, 0), (3, -1, 1)],
)
def test_vmap_of_slopes_and_sinks(query_dim, slopes_dim, sinks_dim, per_batch, device):
    query, slopes, sinks = random(
        "vmap heads",
        *((3, 2, 4, 5, 8), (3, 2, 4) if per_batch else (3, 4), (3, 4)),
        dtype=torch.float64,
    )
    key, value = random("vmap heads keys", *[(2, 2, 7, 8)] * 2, dtype=torch.float64)
    dims = (query_dim, None, None, slopes_dim, sinks_dim)
    tensors = [
        tensor
        if tensor is key or tensor is value
        else tensor[0]
        if dim is None
        else tensor.movedim(0, dim)
        for tensor, dim in zip((query, key, value, slopes, sinks), dims)
    ]

    def function(query, key, value, slopes, sinks):
        return attention(query, key, value, None, slopes, sinks, window_right=0)

    check_vmap(function, dims, *(tensor.to(device) for tensor in tensors))


def test_vmap_within_vmap(device):
    query, key, value = random(
        "vmap twice", (2, 3, 1, 2, 5, 4), (3, 1, 2, 6, 4), (2, 1, 2, 6, 4), dtype=torch.float64
    )
    tensors = [tensor.to(device) for tensor in (query, key, value)]
    inner = torch.vmap(attention, (0, 0, None))
    outputs = torch.vmap(inner, (0, None, 0))(*tensors)
    expected = loop(functools.partial(loop, attention, (0, 0, None)), (0, None, 0), *tensors)
    for output, value in zip(outputs, expected):
        torch.testing.assert_close(output, value, rtol=1e-12, atol=1e-12)


@for_each_once
def test_vmap_of_gradients(spec, make, device):
    """Several output gradients at once, as for a row-by-row Jacobian."""
    sample = make(torch.float64).to(device).requiring_grad()
    outputs = sample.call(spec.operator)
    several = [
        torch.stack([tensor, tensor * 2, -tensor]) for tensor in testing.cotangents_for(outputs)
    ]

    def gradients(cotangents, **keywords):
        tensors = sample.differentiable()
        return torch.autograd.grad(outputs, tensors, cotangents, retain_graph=True, **keywords)

    batched = gradients(several, is_grads_batched=True)
    for gradient, expected in zip(batched, zip(*map(gradients, zip(*several)))):
        torch.testing.assert_close(gradient, torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 2), (None, 0, None)], ids=str)
def test_vmap_of_packed_sequences(in_dims, device):
    """The tensors are mapped; all share the sequences."""
    sample = varlen_sample([(3, 5), (4, 2)], window_right=0)(torch.float64).to(device)
    *_, starts_q, starts_k = sample.inputs[:5]
    tensors = [
        tensor if dim is None else torch.stack([tensor, tensor * 2, -tensor], dim)
        for tensor, dim in zip(sample.inputs, in_dims)
    ]

    def function(query, key, value):
        return finite(
            torch.ops.foo.attention_varlen(query, key, value, starts_q, starts_k, **sample.keywords)
        )

    check_vmap(function, in_dims, *tensors)


# Pages that two sequences share, a part of them in use, and numbers for each head.
PAGED = varlen_sample(
    [(3, 9), (1, 4), (0, 2), (4, 12)],
    heads=4,
    key_heads=2,
    used=(5, 4, 0, 11),
    pages=Pages(4, shared=True),
    slopes=random_bias(4),
    sinks=random_bias(4, 4),
    window_right=1,
)
PLACES = ["query", "key", "value", "starts", "starts", "used", "blocks", "slopes", "sinks"]


@pytest.mark.parametrize(
    ("mapped", "calls"),
    [
        (["query"], 1),
        (["query", "key", "value"], 1),
        (["value"], 1),
        (["query", "used"], 1),
        (["query", "used", "blocks"], 1),
        (["key", "blocks"], 1),
        (["slopes"], 1),
        (["query", "sinks"], 1),
        (["query", "key", "value", "used", "blocks", "slopes", "sinks"], 1),
        (["query", "starts"], 3),
    ],
    ids=str,
)
def test_vmap_of_pages(mapped, calls, device):
    """Mapped calls become sequences of one call, unless the starts of sequences are mapped.

    Unused keys are NaN in the sample; in other blocks they are in use.
    """
    sample = PAGED(torch.float64).to(device)
    in_dims = tuple(0 if place in mapped else None for place in PLACES)
    tensors = [
        (tensor.nan_to_num() if tensor.is_floating_point() else tensor)
        if dim is None
        else slices(place, tensor)
        for place, tensor, dim in zip(PLACES, sample.inputs, in_dims)
    ]

    def function(*inputs):
        return finite(torch.ops.foo.attention_varlen(*inputs, **sample.keywords))

    check_vmap(function, in_dims, *tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.vmap(function, in_dims)(*tensors)
    # The mapped call, and the calls that vmap turns it into.
    assert sum(it.name == "foo::attention_varlen" for it in profile.events()) == 1 + calls


def slices(place, tensor):
    if place == "used":
        return torch.stack([tensor, tensor.clamp(max=1), tensor])
    if place == "blocks":
        return torch.stack([tensor, tensor.flip(0), tensor]).clamp(min=0)
    if place == "starts":
        return torch.stack([tensor] * 3)
    return torch.stack([tensor, -tensor, tensor / 2]).nan_to_num()


@pytest.mark.parametrize("number", [-1, 100])
def test_vmap_of_blocks_that_do_not_exist(number, device):
    """Invalid block numbers do not become blocks of another call."""
    sample = PAGED(torch.float64).to(device)
    query, key, value, starts, starts_k, used, blocks, *_ = sample.inputs
    blocks = torch.stack([blocks, blocks])
    blocks[1, 0, 0] = number
    function = functools.partial(torch.ops.foo.attention_varlen, **sample.keywords)
    for keys in ((key, value), (torch.stack([key] * 2), torch.stack([value] * 2))):
        in_dims = (None, *(None if it is key or it is value else 0 for it in keys), *(None,) * 3, 0)
        with pytest.raises(ValueError, match="attention_varlen: block_table must have block num"):
            torch.vmap(function, in_dims)(query, *keys, starts, starts_k, used, blocks)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(4, 5, 8)], "query must have 4 dimensions (batch, heads, length, head_dim), got 3"),
        ([()], "query must have 4 dimensions (batch, heads, length, head_dim), got 0"),
        ([(2, 4, 5, 8), (1, 4, 5, 8)], "key must have batch size 2 as query has, got 1"),
        (
            [*[(2, 4, 5, 8)] * 3, (1, 2, 4, 5, 5)],
            "attn_bias must have a shape that broadcasts to [2, 4, 5, 5], got [1, 2, 4, 5, 5]",
        ),
        (
            [*[(2, 4, 5, 8)] * 3, (5, 5), (3, 4)],
            "alibi_slopes must have shape [Hq] = [4] or [B, Hq] = [2, 4], got [3, 4]",
        ),
    ],
)
def test_vmap_refuses_a_slice(shapes, message, device):
    """The operator reports the slice's shape, although it is not called with slices."""
    shapes = [*shapes, *[(2, 4, 5, 8)] * (3 - len(shapes))]
    tensors = [torch.zeros(3, *shape, device=device) for shape in shapes]
    with pytest.raises(ValueError, match=rf"\Aattention: {re.escape(message)}\Z"):
        torch.vmap(attention)(*tensors)


# Inputs of empty calls; the last group needs vmap's loop over the calls.
NOTHING = {
    "attention": (ATTENTION, ONCE["attention"][1], range(3)),
    "sinks": (ATTENTION, ONCE["attention"][1], range(6)),
    "packed": (ATTENTION_VARLEN, ONCE["packed"][1], range(5)),
    "blocks": (ATTENTION_VARLEN, ONCE["blocks"][1], [0, 6]),
}


@pytest.mark.parametrize(("spec", "make", "mapped"), NOTHING.values(), ids=NOTHING.keys())
def test_vmap_over_nothing(spec, make, mapped, device):
    sample = make(torch.bfloat16).to(device)
    in_dims = tuple(1 if i in mapped else None for i in range(len(sample.inputs)))
    inputs = [
        tensor if dim is None else tensor.unsqueeze(1).narrow(1, 0, 0)
        for tensor, dim in zip(sample.inputs, in_dims)
    ]
    outputs = torch.vmap(functools.partial(spec.operator, **sample.keywords), in_dims)(*inputs)
    for output, one in zip(outputs, sample.call(spec.operator)):
        assert output.shape == (0, *one.shape)
        assert (output.dtype, output.device) == (one.dtype, one.device)


@for_each_once
def test_vmap_of_no_gradients(spec, make, device):
    sample = make(torch.float64).to(device).requiring_grad()
    outputs = sample.call(spec.operator)
    tensors = sample.differentiable()
    none = [torch.empty(0, *output.shape, dtype=output.dtype, device=device) for output in outputs]
    gradients = torch.vmap(lambda *given: torch.autograd.grad(outputs, tensors, given))(*none)
    for gradient, tensor in zip(gradients, tensors):
        assert gradient.shape == (0, *tensor.shape)
        assert (gradient.dtype, gradient.device) == (tensor.dtype, tensor.device)
