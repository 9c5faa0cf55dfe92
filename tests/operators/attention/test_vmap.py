"""foo::attention and foo::attention_varlen run under torch.vmap."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from support.attention_samples import ONCE, finite, for_each_once

from foo_ops import testing
from foo_ops.testing import ATTENTION, ATTENTION_VARLEN
from foo_ops.testing.spec import random
from foo_ops.testing.specs.attention_varlen import varlen_sample

pytestmark = pytest.mark.usefixtures("one_thread")

attention = torch.ops.foo.attention


# ----------------------------------------------------------------------------------------- vmap


def loop(function, in_dims, *tensors):
    """Compute what vmap does, call by call."""
    sizes = {t.shape[dim] for t, dim in zip(tensors, in_dims) if dim is not None}
    (size,) = sizes
    calls = []
    for index in range(size):
        chosen = [t if dim is None else t.select(dim, index) for t, dim in zip(tensors, in_dims)]
        calls.append(function(*chosen))
    return tuple(map(torch.stack, zip(*calls)))


def check_vmap(function, in_dims, *tensors):
    """Compare values, and gradients that are recorded outside of vmap."""
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
    """Any of the tensors is mapped over 3 slices in any dimension."""
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
    """They have a dimension of their own or none, and fewer dimensions than the scores."""
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
    """A dimension of size 1 that is mapped is not one that is broadcast."""
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
    """Several gradients of the outputs are taken at once, as for a row-by-row Jacobian."""
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
    """The tensors are mapped; the sequences are the same for all."""
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
    """The words are those of the operator, which is not called with slices."""
    shapes = [*shapes, *[(2, 4, 5, 8)] * (3 - len(shapes))]
    tensors = [torch.zeros(3, *shape, device=device) for shape in shapes]
    with pytest.raises(ValueError, match=rf"\Aattention: {re.escape(message)}\Z"):
        torch.vmap(attention)(*tensors)


# A slice of nothing has these inputs; the last ones stand for what a loop over the calls serves.
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


# --------------------------------------------------------------------------------- vmap and dropout

UNIT = torch.eye(60)
RANDOM = {
    "attention": (attention, torch.zeros(1, 1, 50, 8), UNIT.expand(1, 1, -1, -1), (), {}),
    "packed": (
        torch.ops.foo.attention_varlen,
        torch.zeros(50, 1, 8),
        UNIT.unsqueeze(1),
        (torch.tensor([0, 50], dtype=torch.int32), torch.tensor([0, 60], dtype=torch.int32)),
        {"max_seqlen_q": 50, "max_seqlen_k": 60},
    ),
}
for_each_random = pytest.mark.parametrize("name", RANDOM)


def dropout_mask(name, randomness, device, *, count=3, in_dim=0, requires_grad=False, nested=False):
    """Tell which weights dropout keeps for each of ``count`` equal slices of the query."""
    operator, query, value, sequences, keywords = RANDOM[name]
    value = value.to(device)
    key = torch.zeros_like(value[..., :8])
    sequences = [tensor.to(device) for tensor in sequences]

    def function(query):
        return operator(query, key, value, *sequences, **keywords, dropout_p=0.5)[0]

    queries = torch.stack([query.to(device)] * count).requires_grad_(requires_grad)
    if nested:
        outer, inner = randomness
        mapped = torch.vmap(torch.vmap(function, randomness=inner), randomness=outer)
        return mapped(queries.unsqueeze(1).expand(-1, 2, *queries.shape[1:])) != 0
    if in_dim is None:
        # The slices are those of something else.
        mapped = torch.vmap(lambda x: function(queries[0]) + x, randomness=randomness)
        return mapped(torch.zeros(count, device=device)) != 0
    output = torch.vmap(function, randomness=randomness)(queries)
    assert output.requires_grad == requires_grad
    return output != 0


@for_each_random
@pytest.mark.parametrize("in_dim", [0, None], ids=["mapped", "not mapped"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
def test_vmap_refuses_dropout_unless_told_how(name, in_dim, requires_grad, device):
    """The words are those of torch."""
    with pytest.raises(RuntimeError) as of_torch:
        torch.vmap(F.dropout)(torch.zeros(3))
    with pytest.raises(RuntimeError) as ours:
        dropout_mask(name, "error", device, in_dim=in_dim, requires_grad=requires_grad)
    assert str(ours.value) == str(of_torch.value)
    assert "called random operation while in randomness error mode" in str(ours.value)


@for_each_random
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
def test_vmap_with_the_same_dropout(name, requires_grad, device):
    mask = dropout_mask(name, "same", device, requires_grad=requires_grad)
    assert torch.equal(mask, mask[:1].expand_as(mask))
    assert 0.4 < mask.double().mean() < 0.6
    assert not torch.equal(dropout_mask(name, "same", device), mask)


@for_each_random
@pytest.mark.parametrize("in_dim", [0, None], ids=["mapped", "not mapped"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
def test_vmap_with_different_dropout(name, in_dim, requires_grad, device):
    """Half of the 3000 weights of a slice agree with those of another one."""
    requires_grad = requires_grad and in_dim is not None
    mask = dropout_mask(name, "different", device, in_dim=in_dim, requires_grad=requires_grad)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert 0.4 < (mask[first] == mask[second]).double().mean() < 0.6


@for_each_random
@pytest.mark.parametrize("outer", ["same", "different"])
@pytest.mark.parametrize("inner", ["same", "different"])
def test_vmap_within_vmap_with_dropout(name, outer, inner, device):
    """Each vmap has its own say."""
    mask = dropout_mask(name, (outer, inner), device, nested=True)
    assert torch.equal(mask[0], mask[1]) == (outer == "same")
    assert torch.equal(mask[:, 0], mask[:, 1]) == (inner == "same")


@for_each_random
def test_vmap_with_dropout_under_autocast(name, device):
    operator, query, value, sequences, keywords = RANDOM[name]
    inputs = [tensor.to(device) for tensor in (query, value[..., :8], value, *sequences)]

    def function(query):
        return operator(query, *inputs[1:], **keywords, dropout_p=0.5)

    with torch.autocast(device, torch.bfloat16):
        output, logsumexp = torch.vmap(function, randomness="same")(torch.stack([inputs[0]] * 2))
    assert (output.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)


@for_each_random
def test_gradients_of_a_vmap_with_dropout(name, device):
    """The gradient of value is the transposed weights: 2 / 60 where dropout keeps them."""
    operator, query, value, sequences, keywords = RANDOM[name]
    query, value, *sequences = (tensor.to(device) for tensor in (query, value, *sequences))
    values = torch.stack([value] * 3).requires_grad_()

    def function(value):
        key = torch.zeros_like(value[..., :8])
        return operator(query, key, value, *sequences, **keywords, dropout_p=0.5)[0]

    output = torch.vmap(function, randomness="different")(values)
    (gradient,) = torch.autograd.grad(output.sum(), values)
    # The query stands before the heads if it is packed, and the key where it stands.
    by_key = (output != 0).sum(-2 if name == "attention" else -3).double() * 2 / 60
    expected = by_key.unsqueeze(-1) if name == "attention" else by_key.mT.unsqueeze(-1)
    torch.testing.assert_close(gradient.double(), expected.expand_as(gradient), rtol=1e-5, atol=0)
