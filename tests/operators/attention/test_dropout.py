"""Dropout in foo::attention and foo::attention_varlen uses one mask in every pass.

With a multiple of the identity matrix as value, the output is the matrix of probabilities after
dropout, which shows the kept ones.
"""

import dataclasses
import math

import pytest
import torch
from support.attention_dropout import (
    DTYPES,
    UNIT,
    assert_zero_only_where_masked,
    call,
    with_dropout,
    with_unit_value,
)
from support.exact import assert_near
from support.parts import whole
from torch.utils.checkpoint import checkpoint

import foo_ops
from foo_ops import testing
from foo_ops.testing import ATTENTION, ATTENTION_VARLEN, reference
from foo_ops.testing.spec import random
from foo_ops.testing.specs.attention import (
    attention_sample,
    random_bias,
    random_mask,
    random_slopes,
)
from foo_ops.testing.specs.attention_varlen import Pages, varlen_sample

pytestmark = pytest.mark.usefixtures("one_thread")


SAMPLES = {
    "no options": attention_sample(queries=70, keys=80),
    "causal": attention_sample(queries=80, keys=80, is_causal=True),
    "1 query": attention_sample(heads=4, key_heads=1, queries=1, keys=200),
    "bias": attention_sample(heads=4, key_heads=2, bias=random_bias(2, 4, 9, 11)),
    "bias (1, H, 1, Sk)": attention_sample(queries=70, keys=80, bias=random_bias(1, 2, 1, 80)),
    "rows that see nothing": attention_sample(bias=random_mask(9, 11, blind=[2, 8])),
    "all options": attention_sample(
        heads=4,
        key_heads=2,
        queries=130,
        keys=140,
        bias=random_bias(2, 1, 130, 140),
        slopes=lambda dtype: random_slopes(2, 4)(dtype) / 4,
        sinks=random_bias(4),
        softcap=3.0,
        window_left=40,
        window_right=0,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_values_and_gradients(name, dtype, device):
    """Backward uses forward's mask, which is read off the output."""
    sample = with_unit_value(SAMPLES[name](dtype))
    undropped, _ = call(sample, device)
    assert_zero_only_where_masked(undropped, sample.exact().call(ATTENTION.reference)[0])
    leaves = with_dropout(sample, 0.25).to(device).requiring_grad()
    outputs = call(leaves, device)
    dropped = (outputs[0] == 0) & (undropped != 0)
    assert 0 < dropped.sum() < (undropped != 0).sum()
    dropout_mask = ~dropped.cpu()
    known = dataclasses.replace(leaves, keywords={**leaves.keywords, "dropout_mask": dropout_mask})
    testing.check_outputs(ATTENTION, known, dtype, outputs)
    cotangents = testing.cotangents_for(outputs)
    gradients = torch.autograd.grad(outputs, leaves.differentiable(), cotangents)
    testing.check_gradients(ATTENTION, known, gradients, cotangents)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsumexp_does_not_feel_it(dtype, device):
    sample = SAMPLES["all options"](dtype)
    _, expected = call(sample, device)
    _, logsumexp = call(with_dropout(sample, 0.5), device)
    assert torch.equal(logsumexp, expected)


def test_second_derivatives_use_the_same_mask(device):
    sample = with_unit_value(SAMPLES["all options"](torch.float64))
    sample = with_dropout(sample, 0.25).to(device).requiring_grad()
    outputs = call(sample, device)
    dropout_mask = outputs[0].cpu() != 0
    exact = sample.map(lambda t: testing.spec.exact(t).detach().requires_grad_())
    exact = dataclasses.replace(exact, keywords={**exact.keywords, "dropout_mask": dropout_mask})
    results = []
    for leaves, values in ((sample, outputs), (exact, exact.call(ATTENTION.reference))):
        cotangents = [
            cotangent.to(values[0].device) for cotangent in testing.cotangents_for(values)
        ]
        first = torch.autograd.grad(values, leaves.differentiable(), cotangents, create_graph=True)
        total = sum(gradient.square().sum() for gradient in first)
        results.append(torch.autograd.grad(total, leaves.differentiable()))
    for actual, expected in zip(*results):
        size = expected.abs().max().item()
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=1e-11 * size)


SEED = 2**62 + 12345


def seeded(operator, inputs, **keywords):
    """Call the operator with its own seed and a dropout probability of a quarter."""
    seed = torch.tensor([SEED], device=inputs[0].device)
    return operator(*inputs, seed, dropout_p=0.25, **keywords)


def dropout_mask_of_seed(shape, dtype, device):
    seed = torch.tensor([SEED], device=device)
    result = torch.ops.foo.attention_dropout_mask(seed, shape, 0.25, dtype=dtype)
    assert (result.shape, result.dtype, result.device.type) == (shape, dtype, device)
    assert ((result == 0) | (result == 1)).all()
    return result.cpu() == 1


# The first sizes are computed one query at a time, the others in blocks of several panels. From
# 1025 keys on, the keys of few queries are split.
SIZES = (*((queries, 131) for queries in (1, 2, 3, 5, 8, 9, 33, 140)), (1, 1100), (12, 2100))


@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_kernels_have_the_same_dropout_mask(queries, keys, dtype, device):
    """Forward, backward, and the formula for second derivatives show the same mask.

    With equal scores and unit vectors as output gradients, the gradient of value is the transposed
    matrix of weights. A value has at most 256 columns, so it is cut into slices.
    """
    heads = 2
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dropout_mask = dropout_mask_of_seed((2, heads, queries, keys), wide, device)
    query, key = random("dropout", (2, heads, queries, 8), (2, heads, keys, 8), dtype=dtype)
    forward, backward = [], []
    for columns in (UNIT * torch.eye(keys, dtype=dtype)).split(200, -1):
        value = columns.expand(2, heads, -1, -1).to(device).requires_grad_()
        inputs = (query.to(device), key.to(device), value, None, None, None)
        output, _ = seeded(torch.ops.foo.attention_seeded, inputs, scale=0.0)
        forward.append(output.detach().cpu() != 0)
        unit = UNIT * torch.eye(queries, columns.shape[1], dtype=dtype, device=device)
        (gradient,) = torch.autograd.grad(output, value, unit.expand(2, heads, -1, -1))
        backward.append(gradient.cpu() != 0)
    assert torch.equal(torch.cat(forward, -1), dropout_mask)
    seen = min(queries, 200)
    for mask in backward:
        columns = min(seen, mask.shape[-1])
        assert torch.equal(mask[..., :columns].mT, dropout_mask[:, :, :columns])


@pytest.mark.parametrize("pages", [None, Pages(16)], ids=["packed", "pages"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences_have_the_same_dropout_mask(dtype, pages, device):
    """Random numbers of a query and a key depend on their places within their sequence."""
    lengths = [(1, 30), (8, 7), (0, 3), (40, 150), (3, 1)]
    longest = 150
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dropout_mask = dropout_mask_of_seed((len(lengths), 2, 40, longest), wide, device)
    sample = varlen_sample(lengths, scale=0.0, pages=pages)(dtype)
    _, key, value, *_ = sample.inputs
    value = torch.zeros(*value.shape[:-1], longest, dtype=dtype)
    for sequence in reference.sequences(*sample.inputs[3:7], key):
        rows = UNIT * torch.eye(longest, dtype=dtype)[: len(sequence.keys)]
        value.flatten(0, -3)[sequence.keys] = rows.unsqueeze(1).expand(-1, 2, -1)
    sample = dataclasses.replace(sample, inputs=(*sample.inputs[:2], value, *sample.inputs[3:]))
    sample = sample.to(device)
    output, _ = seeded(torch.ops.foo.attention_varlen_seeded, sample.inputs, **sample.keywords)
    for index, rows in enumerate(output.cpu().split([queries for queries, _ in lengths])):
        queries, keys = lengths[index]
        expected = dropout_mask[index, :, :queries, :keys].transpose(0, 1)
        assert torch.equal(rows[..., :keys] != 0, expected)


@pytest.mark.parametrize(
    ("spec", "make"),
    [
        (ATTENTION, SAMPLES["all options"]),
        (ATTENTION, SAMPLES["1 query"]),
        (
            ATTENTION_VARLEN,
            varlen_sample(
                [(3, 5), (70, 80), (0, 4), (1, 130)],
                heads=4,
                key_heads=2,
                slopes=lambda dtype: random_slopes(4, 4)(dtype) / 4,
                sinks=random_bias(4),
                used=(5, 77, 0, 100),
                pages=Pages(16),
                window_right=0,
            ),
        ),
    ],
    ids=["attention", "1 query", "blocks"],
)
def test_gradients_that_can_be_differentiated_are_the_same(spec, make, device):
    """A different formula computes these gradients, with the same mask."""
    sample = with_dropout(make(torch.float64), 0.25).to(device).requiring_grad()
    torch.manual_seed(0)
    outputs = sample.call(spec.operator)
    cotangents = testing.cotangents_for(outputs)
    tensors = sample.differentiable()
    expected = torch.autograd.grad(outputs, tensors, cotangents, retain_graph=True)
    actual = torch.autograd.grad(outputs, tensors, cotangents, create_graph=True)
    for gradient, value in zip(actual, expected):
        assert gradient.requires_grad
        size = value.abs().max().item()
        torch.testing.assert_close(gradient, value, rtol=0, atol=1e-12 * size)


def test_same_seed_same_result(device):
    sample = with_dropout(SAMPLES["all options"](torch.float32), 0.5).to(device).requiring_grad()
    results = []
    for threads in (1, 2, 3, 3):
        torch.set_num_threads(threads)
        outputs = call(sample, device)
        gradients = torch.autograd.grad(
            outputs, sample.differentiable(), testing.cotangents_for(outputs)
        )
        results.append((*outputs, *gradients))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_gradients_do_not_draw_again(device):
    """A second backward pass, and calls in between, do not change the gradients."""
    sample = with_dropout(SAMPLES["causal"](torch.float32), 0.5).to(device).requiring_grad()
    outputs = call(sample, device)
    cotangents = testing.cotangents_for(outputs)
    first = torch.autograd.grad(outputs, sample.differentiable(), cotangents, retain_graph=True)
    call(sample, device, seed=1)
    second = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
    assert all(map(torch.equal, first, second))


def test_same_values_with_and_without_gradients(device):
    sample = with_dropout(SAMPLES["no options"](torch.float32), 0.5).to(device)
    expected = call(sample, device)
    assert all(map(torch.equal, call(sample.requiring_grad(), device), expected))


def test_same_numbers_on_both_devices():
    sample = with_dropout(SAMPLES["no options"](torch.float32), 0.5)
    for output, expected in zip(call(sample, "foo"), call(sample, "cpu")):
        assert torch.equal(output.cpu(), expected)


def test_state_of_the_generator(device):
    """Each call moves the state, and restoring it repeats the numbers."""
    module = torch if device == "cpu" else torch.foo
    sample = with_dropout(SAMPLES["no options"](torch.float32), 0.5).to(device)
    state = module.get_rng_state()
    first, _ = sample.call(ATTENTION.operator)
    assert not torch.equal(module.get_rng_state(), state)
    second, _ = sample.call(ATTENTION.operator)
    module.set_rng_state(state)
    third, _ = sample.call(ATTENTION.operator)
    assert torch.equal(third, first)
    assert not torch.equal(second, first)


def test_nothing_is_drawn_without_dropout(device):
    module = torch if device == "cpu" else torch.foo
    sample = SAMPLES["no options"](torch.float32)
    expected = call(sample, device)
    torch.manual_seed(0)
    state = module.get_rng_state()
    outputs = with_dropout(sample, 0.0).to(device).call(ATTENTION.operator)
    assert all(map(torch.equal, outputs, expected))
    assert torch.equal(module.get_rng_state(), state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nearly_everything_is_dropped(dtype, device):
    """Results are finite, or infinite where the dtype is too narrow, but never NaN."""
    sample = with_dropout(SAMPLES["causal"](dtype), math.nextafter(1.0, 0.0))
    leaves = sample.to(device).requiring_grad()
    output, logsumexp = call(leaves, device)
    assert (output == 0).all()
    assert logsumexp.isfinite().all()
    gradients = torch.autograd.grad(output.sum(), leaves.differentiable())
    assert all((gradient == 0).all() for gradient in gradients)


def test_checkpoint_computes_the_same_again(device):
    sample = with_dropout(SAMPLES["no options"](torch.float32), 0.5).to(device).requiring_grad()

    def function(*inputs):
        return foo_ops.attention(*inputs, dropout_p=0.5)

    results = []
    for run in (function, lambda *inputs: checkpoint(function, *inputs, use_reentrant=False)):
        torch.manual_seed(0)
        output = run(*sample.inputs[:3])
        gradients = torch.autograd.grad(output.square().sum(), sample.differentiable())
        results.append((output, *gradients))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_compiled(device):
    """A graph's forward and backward share a mask, which is not compiled in as a constant."""
    backend = "inductor" if device == "cpu" else "aot_eager"
    sample = with_unit_value(SAMPLES["no options"](torch.float32)).to(device).requiring_grad()

    @torch.compile(backend=backend, fullgraph=True)
    def function(query, key, value):
        return foo_ops.attention(query * 2, key, value, dropout_p=0.5) * 2

    query, key, value = sample.inputs[:3]
    outputs = [function(query, key, value) for _ in range(2)]
    assert not torch.equal(*outputs)
    (gradient,) = torch.autograd.grad(outputs[0].sum(), value)
    # A column is 2 * UNIT times the weights of a key; the gradient is twice their sum.
    query, key, value = (tensor.detach().cpu().double() for tensor in (query, key, value))
    dropout_mask = outputs[0].detach().cpu() != 0
    weights, _ = reference.attention(
        query * 2, key, value, dropout_mask=dropout_mask, dropout_p=0.5
    )
    expected = 2 * weights.sum(2).unsqueeze(-1).expand_as(value) / UNIT
    assert_near(gradient, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        varlen_sample([(3, 5), (70, 80), (0, 4), (1, 130)]),
        varlen_sample(
            [(3, 5), (70, 80), (1, 130)],
            heads=4,
            key_heads=2,
            used=(5, 77, 100),
            pages=Pages(16),
            sinks=random_bias(4),
            window_right=0,
        ),
    ],
    ids=["packed", "pages"],
)
def test_varlen(make, dtype, device):
    """The reference takes the mask read off the output."""
    sample = make(dtype)
    query, key, value, *_ = sample.inputs
    longest = sample.keywords["max_seqlen_k"]
    value = torch.full((*value.shape[:-1], longest), math.nan, dtype=dtype)
    for sequence in reference.sequences(*sample.inputs[3:7], key):
        rows = UNIT * torch.eye(longest, dtype=dtype)[: len(sequence.keys)]
        value.flatten(0, -3)[sequence.keys] = rows.unsqueeze(1).expand(-1, value.shape[-2], -1)
    sample = dataclasses.replace(sample, inputs=(query, key, value, *sample.inputs[3:]))
    undropped, _ = sample.to(device).call(ATTENTION_VARLEN.operator)
    assert_zero_only_where_masked(undropped, sample.exact().call(ATTENTION_VARLEN.reference)[0])
    leaves = with_dropout(sample, 0.25).to(device).requiring_grad()
    torch.manual_seed(0)
    outputs = leaves.call(ATTENTION_VARLEN.operator)
    dropped = ((outputs[0] == 0) & (undropped != 0)).cpu()
    assert abs(dropped.sum() / (undropped != 0).sum() - 0.25) < 0.02
    dropout_mask = ~dropped.transpose(0, 1)
    known = dataclasses.replace(leaves, keywords={**leaves.keywords, "dropout_mask": dropout_mask})
    testing.check_outputs(ATTENTION_VARLEN, known, dtype, outputs)
    cotangents = testing.cotangents_for(outputs)
    gradients = torch.autograd.grad(outputs, leaves.differentiable(), cotangents)
    testing.check_gradients(ATTENTION_VARLEN, known, gradients, cotangents)
