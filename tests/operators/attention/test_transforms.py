"""foo::attention and foo::attention_varlen work with autocast, symbolic sizes, FLOP counting."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from foo_ops.testing import ATTENTION, ATTENTION_VARLEN
from foo_ops.testing.spec import random
from foo_ops.testing.specs.attention import attention_sample, random_bias, random_slopes
from foo_ops.testing.specs.attention_varlen import Pages, varlen_sample

pytestmark = pytest.mark.usefixtures("one_thread")

attention = torch.ops.foo.attention


# ------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    """float32 inputs run in autocast's dtype; gradients come back in float32."""
    sample = attention_sample(heads=4, key_heads=2, queries=70, keys=80)(torch.float32)
    leaves = sample.to(device).requiring_grad()
    with torch.autocast(device, dtype):
        output, logsumexp = leaves.call(ATTENTION.operator)
    narrow = leaves.map(lambda tensor: tensor.detach().to(dtype)).requiring_grad()
    expected = narrow.call(ATTENTION.operator)
    assert output.dtype == dtype
    assert torch.equal(output, expected[0])
    assert torch.equal(logsumexp, expected[1])
    output.sum().backward()
    expected[0].sum().backward()
    for leaf, expected_leaf in zip(leaves.differentiable(), narrow.differentiable()):
        assert leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad, expected_leaf.grad.float())


def test_autocast_of_what_is_added_to_the_scores(device):
    """Bias, slopes and sinks are cast too, as torch casts a mask."""
    sample = attention_sample(
        heads=4,
        key_heads=2,
        bias=random_bias(4, 9, 11),
        slopes=random_slopes(4),
        sinks=random_bias(4),
    )(torch.float32).to(device)
    with torch.autocast(device, torch.bfloat16):
        output, logsumexp = attention(*sample.inputs)
    expected = attention(*(tensor.bfloat16() for tensor in sample.inputs))
    assert torch.equal(output, expected[0])
    assert torch.equal(logsumexp, expected[1])


def test_autocast_of_mixed_dtypes(device):
    """A projection in bfloat16 meets a cache in float32."""
    query, key, value = random("mixed", *[(1, 2, 5, 8)] * 3, dtype=torch.float32)
    query, key, value = query.to(device), key.to(device).bfloat16(), value.to(device)
    with torch.autocast(device, torch.bfloat16):
        output, _ = attention(query, key, value)
    expected, _ = attention(query.bfloat16(), key, value.bfloat16())
    assert torch.equal(output, expected)


def test_autocast_does_not_touch_float64(device):
    tensors = random("double", *[(1, 2, 5, 8)] * 3, dtype=torch.float64)
    tensors = [tensor.to(device) for tensor in tensors]
    with torch.autocast(device, torch.bfloat16):
        output, _ = attention(*tensors)
    assert output.dtype == torch.float64
    assert torch.equal(output, attention(*tensors)[0])


def test_autocast_can_be_switched_off_inside(device):
    tensors = [tensor.to(device) for tensor in torch.randn(3, 1, 2, 5, 8)]
    with torch.autocast(device, torch.bfloat16), torch.autocast(device, enabled=False):
        output, _ = attention(*tensors)
    assert output.dtype == torch.float32


def test_autocast_of_packed_sequences(device):
    sample = varlen_sample([(3, 5), (70, 66)], slopes=random_slopes(2))(torch.float32).to(device)
    with torch.autocast(device, torch.bfloat16):
        output, logsumexp = sample.call(ATTENTION_VARLEN.operator)
    narrow = sample.map(lambda t: t.bfloat16() if t.is_floating_point() else t)
    expected = narrow.call(ATTENTION_VARLEN.operator)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected[0])
    assert torch.equal(logsumexp, expected[1])


# ------------------------------------------------------------------------- sizes that are not known


def test_sizes_that_depend_on_values(device):
    """torch.compile only knows which of these sizes are equal."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        rows = torch.ones(6, dtype=torch.bool, device=device).nonzero().flatten()
        query, key = torch.randn(6, 4, 5, 8, device=device), torch.randn(6, 2, 7, 8, device=device)
        bias, slopes = torch.randn(6, 1, 5, 7, device=device), torch.randn(6, 4, device=device)
        query, key, bias, slopes = (tensor[rows] for tensor in (query, key, bias, slopes))
        output, _ = attention(query.requires_grad_(), key, key, bias, slopes)
        (gradient,) = torch.autograd.grad(output.sum(), query)
        assert not isinstance(output.shape[0], int)
        assert output.shape == gradient.shape == query.shape
        packed, _ = torch.ops.foo.attention_varlen(
            *(tensor.flatten(0, 1)[:, :2] for tensor in (query, query, query)),
            *[torch.tensor([0, 20], dtype=torch.int32, device=device)] * 2,
            max_seqlen_q=rows.shape[0] * 4,
            max_seqlen_k=rows.shape[0] * 4,
        )
        assert packed.shape == (rows.shape[0] * 4, 2, 8)


# ---------------------------------------------------------------------------------------- FLOPs


def flops(function):
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


@pytest.mark.parametrize(
    ("value_dim", "options"),
    [(16, {}), (16, {"is_causal": True}), (16, {"window_left": 3, "softcap": 2.0}), (24, {})],
    ids=str,
)
def test_flops(value_dim, options, device):
    """Masked pairs count like all others: two products forward, five backward."""
    sample = attention_sample(
        heads=4, key_heads=2, queries=9, keys=11, value_dim=value_dim, **options
    )(torch.float32)
    sample = sample.to(device).requiring_grad()
    pairs = 2 * 4 * 9 * 11
    count, (output, _) = flops(lambda: sample.call(ATTENTION.operator))
    assert count == 2 * pairs * (16 + value_dim)
    count, _ = flops(lambda: output.sum().backward())
    assert count == 2 * pairs * (3 * 16 + 2 * value_dim)


def test_flops_with_a_bias(device):
    """The bias gets the gradient of the scores, which needs no product of its own."""
    sample = attention_sample(heads=4, queries=9, keys=11, value_dim=24, bias=random_bias(9, 11))
    sample = sample(torch.float32).to(device).requiring_grad()
    output, _ = sample.call(ATTENTION.operator)
    count, _ = flops(lambda: output.sum().backward())
    assert count == 2 * (2 * 4 * 9 * 11) * (3 * 16 + 2 * 24)


def test_flops_without_gradients(device):
    sample = attention_sample(queries=9, keys=11)(torch.float32).to(device)
    with torch.no_grad():
        count, _ = flops(lambda: sample.call(ATTENTION.operator))
    assert count == 2 * (2 * 2 * 9 * 11) * (16 + 16)


@pytest.mark.parametrize(("heads", "options"), [(4, {}), (2, {"is_causal": True})])
def test_flops_of_scaled_dot_product_attention_on_foo(heads, options):
    """Counts as foo::attention, whose kernels it runs, and only once."""
    tensors = [
        torch.randn(2, count, length, size, device="foo", requires_grad=True)
        for count, length, size in ((4, 9, 16), (heads, 11, 16), (heads, 11, 24))
    ]
    pairs = 2 * 4 * 9 * 11
    count, output = flops(
        lambda: F.scaled_dot_product_attention(*tensors, enable_gqa=heads != 4, **options)
    )
    assert count == 2 * pairs * (16 + 24)
    count, _ = flops(lambda: output.sum().backward())
    assert count == 2 * pairs * (3 * 16 + 2 * 24)


@pytest.mark.parametrize("pages", [None, Pages(4)], ids=["packed", "pages"])
def test_flops_of_packed_sequences(pages, device):
    """Each sequence's queries count with the keys it uses."""
    lengths, used = ((3, 5), (7, 9), (0, 4)), (5, 8, 3)
    sample = varlen_sample(lengths, heads=4, key_heads=2, value_dim=8, used=used, pages=pages)
    sample = sample(torch.float32).to(device).requiring_grad()
    pairs = 4 * (3 * 5 + 7 * 8)
    count, (output, _) = flops(lambda: sample.call(ATTENTION_VARLEN.operator))
    assert count == 2 * pairs * (16 + 8)
    count, _ = flops(lambda: output.sum().backward())
    assert count == 2 * pairs * (3 * 16 + 2 * 8)
