"""foo::attention is as exact as torch's own operators in the same dtype.

Each error is measured against closed formulas in float64 (tests/support/attention_exact.py), and
torch's in the same test: ours may be ``ROOM`` times it, and a few roundings of the dtype more.
"""

import numpy as np
import pytest
import torch
from support.attention_exact import exact_attention, relative_error
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import foo_ops
from foo_ops.ops.arguments import compute_type

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROOM = 1.5


def number_for(dtype):
    """Return the type in which errors of this dtype are measured."""
    return np.longdouble if dtype == torch.float64 else np.float64


def random(seed, *shapes, dtype, mean=0.0):
    """Draw normal numbers, as leaves that require gradients."""
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
    """Return inputs and a scale that give exact scores of 8 to 18 times the cap, of both signs.

    Float64 scores are 20 to 45 times the cap. At such sizes 1 - tanh^2, computed as written, loses
    every digit of the compute type.
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
    """The derivative of tanh keeps all its digits at 1e-7 and below.

    Only the rounding of its argument limits them.
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
    """The reference is central differences of the first derivative's closed formula."""
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


# ------------------------------------------------------------- sums of the gradients of the scores


def leaves(dtype, queries, keys, *, heads=4, key_heads=4, bias=(), slopes=True, sinks=False):
    """Make inputs of attention; tensors whose gradients are sums over keys are not rounded."""
    compute = compute_type(dtype)
    tensors = random(0, (1, heads, queries, 32), *[(1, key_heads, keys, 32)] * 2, dtype=dtype)
    own_bias = random(1, bias, dtype=dtype if bias[-1] > 1 else compute)[0] if bias else None
    slope = (2.0 ** -torch.arange(1, heads + 1)).to(compute).requires_grad_() if slopes else None
    sink = random(2, (heads,), dtype=compute, mean=1.0)[0] if sinks else None
    return [*tensors, own_bias, slope, sink]


SUMS = {
    "causal, many keys": ((16, 2048), {}, {"is_causal": True}),
    "causal, 7 x 257": ((7, 257), {}, {"is_causal": True}),
    "causal, several blocks": ((150, 600), {}, {"is_causal": True}),
    "all keys": ((16, 700), {}, {}),
    "more queries than keys": ((700, 16), {}, {}),
    "windows": ((20, 900), {}, {"window_left": 500, "window_right": 3}),
    "far window": ((20, 900), {}, {"window_left": 890, "is_causal": True}),
    "sinks": ((16, 700), {"sinks": True}, {}),
    "sinks, causal": ((12, 40), {"sinks": True}, {"is_causal": True}),
    "sinks alone": ((16, 700), {"sinks": True, "slopes": False}, {}),
    "sinks and rows that see nothing": ((40, 20), {"sinks": True}, {"window_right": 0}),
    "rows that see nothing": ((700, 20), {}, {"window_right": 0}),
    "bias": ((16, 700), {"bias": (4, 16, 700)}, {"is_causal": True}),
    "bias for each query": ((140, 300), {"bias": (4, 140, 1), "sinks": True}, {}),
    "one bias": ((140, 300), {"bias": (1,), "sinks": True}, {}),
    "bias for each head": ((16, 700), {"bias": (4, 1, 1), "sinks": True}, {}),
    "bias for each key": ((140, 300), {"bias": (300,)}, {}),
    "softcap": ((16, 700), {}, {"is_causal": True, "softcap": 3.0}),
    "grouped heads": ((16, 700), {"key_heads": 2, "sinks": True}, {}),
    "large scores": ((16, 700), {"bias": (4, 1, 1)}, {"scale": 60.0}),
    "everything": (
        (30, 700),
        {"key_heads": 1, "bias": (30, 1), "sinks": True},
        {"window_left": 680, "softcap": 2.0},
    ),
}


@pytest.mark.parametrize("with_logsumexp", [False, True], ids=["", "logsumexp"])
@pytest.mark.parametrize(("lengths", "has", "options"), SUMS.values(), ids=SUMS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_are_sums_over_keys(dtype, lengths, has, options, with_logsumexp):
    """The output's rounding and a row's distance do not show in these gradients."""
    inputs = leaves(dtype, *lengths, **has)
    ours = foo_ops.attention(*inputs, **options, return_logsumexp=True)
    check_sums(inputs, ours, with_logsumexp, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_are_sums_over_keys_with_dropout(dtype):
    inputs = leaves(dtype, 16, 700, bias=(16, 1), sinks=True)
    seed = torch.tensor([7])
    ours = torch.ops.foo.attention_seeded(*inputs, seed, dropout_p=0.3)
    dropout_mask = torch.ops.foo.attention_dropout_mask(
        seed, (1, 4, 16, 700), 0.3, dtype=compute_type(dtype)
    )
    options = {"dropout_factors": dropout_mask / (1 - 0.3)}
    check_sums(inputs, ours, True, options)


def in_pages(tensors, size):
    """Store rows (heads, length, dim) of several sequences in pages, in reverse order.

    Returns the pages and their table.
    """
    pages, table, most = [], [], max(-(-t.shape[1] // size) for t in tensors)
    for tensor in tensors:
        missing = -tensor.shape[1] % size
        rows = torch.cat((tensor, tensor.new_zeros(tensor.shape[0], missing, tensor.shape[2])), 1)
        own = rows.unflatten(1, (-1, size)).movedim(0, 2)
        table.append([len(pages) + index for index in range(len(own))])
        table[-1] += [0] * (most - len(own))
        pages += own
    numbers = torch.tensor(table, dtype=torch.int32)
    return torch.stack(pages[::-1]), len(pages) - 1 - numbers


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "pages"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_are_sums_over_keys_of_packed_sequences(dtype, paged):
    """Each sequence has its own slopes, and sees only keys far away."""
    options = {"window_left": 2000, "window_right": -1, "softcap": 4.0}
    lengths = [(7, 257), (16, 600)]
    parts = [leaves(dtype, *length, sinks=True) for length in lengths]
    sinks = parts[0][5]
    slopes = torch.stack([part[4] for part in parts])
    rows = [[part[index].squeeze(0) for part in parts] for index in range(3)]
    starts_q, starts_k = (
        torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for sizes in zip(*lengths)
    )
    query = torch.cat(rows[0], 1).transpose(0, 1)
    used, table = None, None
    if paged:
        key, table = in_pages(rows[1], 64)
        value, _ = in_pages(rows[2], 64)
        used = starts_k.diff()
    else:
        key, value = (torch.cat(rows[index], 1).transpose(0, 1) for index in (1, 2))
    output, logsumexp = foo_ops.attention_varlen(
        *(query, key, value, starts_q, starts_k, used, table, slopes, sinks),
        max_seqlen_q=16,
        max_seqlen_k=600,
        return_logsumexp=True,
        **options,
    )
    for index, part in enumerate(parts):
        first, stop = starts_q[index : index + 2].tolist()
        own = (output[first:stop].transpose(0, 1)[None], logsumexp[:, first:stop][None])
        inputs = [*part[:5], sinks]
        check_sums(inputs, own, True, options)


def check_sums(inputs, ours, with_logsumexp, options):
    dtype = inputs[0].dtype
    grad_output = random(3, ours[0].shape, dtype=dtype)[0].detach()
    grad_logsumexp = random(4, ours[1].shape, dtype=ours[1].dtype)[0].detach()
    # No gradient can pass through the logsumexp of a row that sees nothing.
    grad_logsumexp = grad_logsumexp.where(ours[1].isfinite(), 0) * with_logsumexp
    sums = {
        name: t
        for name, t in zip(("attn_bias", "alibi_slopes", "sinks"), inputs[3:], strict=True)
        if t is not None
    }
    cotangents = (grad_output, grad_logsumexp)
    own = torch.autograd.grad(ours, list(sums.values()), cotangents, retain_graph=True)
    exact = exact_attention(inputs, cotangents, number=number_for(dtype), **options)
    for name, gradient in zip(sums, own, strict=True):
        error = relative_error(gradient, exact[name])
        stored = 2 * torch.finfo(sums[name].dtype).eps
        computed = 4 * torch.finfo(compute_type(dtype)).eps * cancellation(exact, name)
        assert error <= stored + computed, f"{name}: {error} of {stored + computed}"


def cancellation(exact, name):
    """Return the ratio of the size of a sum's terms to the size of the sum."""
    terms, total = (np.linalg.norm(exact[key].ravel()) for key in (f"{name} terms", name))
    return float(terms / total)


# ------------------------------------------------------------------------- long sums beside flash's

LONG = {
    "1024 x 1024": ((1024, 1024), False),
    "causal": ((1024, 1024), True),
    "many keys": ((128, 4096), False),
    "few queries": ((4, 1024), False),
    "one query, split keys": ((1, 8192), False),
    "few queries, split keys": ((7, 5000), False),
    "odd lengths": ((77, 1501), False),
}


def flash(query, key, value, is_causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def long_sample(dtype, queries, keys, mean, head_dim=64):
    """Make values and output gradients with this mean: their sums lose the most digits."""
    query, key = random(5, *[(1, 2, length, head_dim) for length in (queries, keys)], dtype=dtype)
    value = random(6, (1, 2, keys, head_dim), dtype=dtype, mean=mean)[0]
    grad_output = random(7, query.shape, dtype=dtype, mean=mean / 3)[0].detach()
    return [query, key, value], grad_output


def check_beside_flash(names, ours, theirs, exact, dtype):
    for name, own, other in zip(names, ours, theirs, strict=True):
        errors = relative_error(own, exact[name]), relative_error(other, exact[name])
        message = f"{name}: {errors[0]:.2e}, flash {errors[1]:.2e}"
        assert errors[0] <= ROOM * errors[1] + torch.finfo(dtype).eps / 2, message


def zeros_like_logsumexp(output):
    return torch.zeros(output.shape[:-1])


@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize(("lengths", "is_causal"), LONG.values(), ids=LONG.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_of_many_keys_beside_flash(dtype, lengths, is_causal, mean, device):
    """Weights and weighted values are summed tile by tile, not key by key."""
    inputs, grad_output = long_sample(dtype, *lengths, mean)
    output = foo_ops.attention(*(t.to(device) for t in inputs), is_causal=is_causal)
    exact = exact_attention(
        inputs, (grad_output, zeros_like_logsumexp(output)), is_causal=is_causal
    )
    check_beside_flash(["output"], [output], [flash(*inputs, is_causal)], exact, dtype)


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "pages"])
@pytest.mark.parametrize("queries", [1, 100])
def test_outputs_of_packed_sequences_beside_flash(queries, paged):
    inputs, grad_output = long_sample(torch.float32, queries, 1024, 3.0)
    query, key, value = (t.detach().squeeze(0).transpose(0, 1) for t in inputs)
    used, table = None, None
    if paged:
        (key, table), (value, _) = (in_pages([t.detach().squeeze(0)], 48) for t in inputs[1:])
        used = torch.tensor([1024], dtype=torch.int32)
    starts = [torch.tensor([0, length], dtype=torch.int32) for length in (queries, 1024)]
    output = foo_ops.attention_varlen(
        *(query, key, value, *starts, used, table), max_seqlen_q=queries, max_seqlen_k=1024
    )
    own = output.transpose(0, 1)[None]
    exact = exact_attention(inputs, (grad_output, zeros_like_logsumexp(own)))
    check_beside_flash(["output"], [own], [flash(*inputs, False)], exact, torch.float32)


@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize(
    ("lengths", "is_causal"),
    [((1024, 1024), False), ((1024, 1024), True), ((1, 8192), False)],
    ids=["1024 x 1024", "causal", "one query"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_many_keys_beside_flash(dtype, lengths, is_causal, mean):
    """A weight is as precise as the logsumexp, also in units of log 2, which need more digits."""
    inputs, grad_output = long_sample(dtype, *lengths, mean)
    output, other = foo_ops.attention(*inputs, is_causal=is_causal), flash(*inputs, is_causal)
    exact = exact_attention(
        inputs, (grad_output, zeros_like_logsumexp(output)), is_causal=is_causal
    )
    ours, theirs = (torch.autograd.grad(t, inputs, grad_output) for t in (output, other))
    check_beside_flash(["query", "key", "value"], ours, theirs, exact, dtype)
