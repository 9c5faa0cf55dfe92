"""foo::attention computes what its options specify: semantics, NaN, layouts, autograd."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import foo_ops
from foo_ops import testing
from foo_ops.testing import ATTENTION
from foo_ops.testing.arguments import reversed_dimensions
from foo_ops.testing.spec import random
from foo_ops.testing.specs.attention import attention_sample, random_bias, random_slopes

pytestmark = pytest.mark.usefixtures("one_thread")


DTYPES = ATTENTION.dtypes


def call(sample, device):
    return sample.to(device).call(ATTENTION.operator)


def test_public_function(device):
    query, key, value = torch.randn(3, 2, 4, 6, 8).to(device)
    others = [torch.randn(shape, device=device) for shape in ((6, 6), (2, 4), (4,))]
    options = {
        "is_causal": True,
        "scale": 0.3,
        "window_left": 3,
        "window_right": 1,
        "softcap": 2.0,
    }
    expected = torch.ops.foo.attention(query, key, value, *others, **options)
    output = foo_ops.attention(query, key, value, *others, **options)
    assert torch.equal(output, expected[0])
    both = foo_ops.attention(query, key, value, *others, return_logsumexp=True, **options)
    assert isinstance(both, tuple)
    assert all(map(torch.equal, both, expected))


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_with_torch(queries, keys, is_causal, device):
    """Our operator and torch's align the causal mask and order grouped heads alike."""
    query, key, value = random(
        "torch", (2, 6, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8), dtype=torch.float64
    )
    expected = F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=True
    )
    output = foo_ops.attention(*(t.to(device) for t in (query, key, value)), is_causal=is_causal)
    torch.testing.assert_close(output.cpu(), expected, rtol=0, atol=1e-13)


def test_by_hand(device):
    """Two keys with scores 0 and ln 3 have weights 1/4 and 3/4, and a logsumexp of ln 4."""
    query = torch.tensor([[[[1.0, 2.0]]]], device=device)
    key = torch.tensor([[[[0.0, 0.0], [math.log(3.0), 0.0]]]], device=device)
    value = torch.tensor([[[[4.0], [8.0]]]], device=device)
    output, logsumexp = foo_ops.attention(query, key, value, scale=1.0, return_logsumexp=True)
    assert output.item() == pytest.approx(7.0, rel=1e-6)
    assert logsumexp.item() == pytest.approx(math.log(4.0), rel=1e-6)


@pytest.mark.parametrize(
    ("queries", "keys", "window", "seen"),
    [
        # Query i of 2 stands at key i + 2 of 4.
        (2, 4, (1, 0), [[1, 2], [2, 3]]),
        (2, 4, (-1, 0), [[0, 1, 2], [0, 1, 2, 3]]),
        (2, 4, (0, -1), [[2, 3], [3]]),
        (2, 4, (0, 0), [[2], [3]]),
        (2, 4, (1, 1), [[1, 2, 3], [2, 3]]),
        # With more queries than keys, the first queries stand before the first key.
        (4, 2, (-1, 0), [[], [], [0], [0, 1]]),
        (4, 2, (0, 1), [[], [0], [0, 1], [1]]),
        (3, 3, (2**63 - 1, 0), [[0], [0, 1], [0, 1, 2]]),
        (3, 3, (0, 2**63 - 1), [[0, 1, 2], [1, 2], [2]]),
    ],
)
def test_windows_by_hand(queries, keys, window, seen, device):
    """With equal scores and the identity matrix as value, the output shows the seen keys."""
    query, key = torch.zeros(1, 1, queries, 2), torch.zeros(1, 1, keys, 2)
    output, logsumexp = torch.ops.foo.attention(
        *(tensor.to(device) for tensor in (query, key, torch.eye(keys)[None, None])),
        window_left=window[0],
        window_right=window[1],
    )
    rows = [[1 / len(row) if key in row else 0.0 for key in range(keys)] for row in seen]
    torch.testing.assert_close(output[0, 0].cpu(), torch.tensor(rows))
    counts = torch.tensor([float(len(row)) for row in seen])
    torch.testing.assert_close(logsumexp[0, 0].cpu(), counts.log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_window_of_one_key(dtype, device):
    """However queries and keys are cut into tiles, each query sees only its own key."""
    for queries, more in itertools.product((*range(1, 140), 192, 193, 256, 257, 300), (0, 1, 7, 8)):
        keys = queries + more
        query, key = (torch.zeros(1, 1, count, 8, dtype=dtype) for count in (queries, keys))
        (value,) = random("diagonal", (1, 1, keys, 8), dtype=dtype)
        query, key, value = (tensor.to(device) for tensor in (query, key, value))
        output, logsumexp = torch.ops.foo.attention(
            query, key, value.requires_grad_(), window_left=0, window_right=0
        )
        assert torch.equal(output, value[:, :, more:])
        assert (logsumexp == 0).all()
        (gradient,) = torch.autograd.grad(output, value, output.detach())
        assert (gradient[:, :, :more] == 0).all()
        assert torch.equal(gradient[:, :, more:], output)


def test_causal_and_window_together(device):
    """is_causal counts from the upper left, the window from the lower right: both apply."""
    query, key = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 4, 2)
    output, _ = torch.ops.foo.attention(
        *(tensor.to(device) for tensor in (query, key, torch.eye(4)[None, None])),
        is_causal=True,
        window_left=1,
    )
    assert output[0, 0].tolist() == [[0.0] * 4, [0.0] * 4]
    output, _ = torch.ops.foo.attention(
        *(tensor.to(device) for tensor in (query, key, torch.eye(4)[None, None])),
        is_causal=True,
        window_left=2,
    )
    assert output[0, 0].tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]


def test_slopes_by_hand(device):
    """The last of 2 queries stands at the last of 3 keys; later keys count by their distance."""
    query, key = torch.zeros(1, 2, 2, 1, device=device), torch.zeros(1, 2, 3, 1, device=device)
    slopes = torch.tensor([1.0, -0.5], device=device)
    _, logsumexp = torch.ops.foo.attention(query, key, key, None, slopes)
    for slope, rows in zip((1.0, -0.5), logsumexp[0].tolist()):
        for distances, actual in zip(((1, 0, 1), (2, 1, 0)), rows):
            expected = math.log(sum(math.exp(-slope * distance) for distance in distances))
            assert actual == pytest.approx(expected, rel=1e-6)


def test_sinks_by_hand(device):
    """A key with score 0 and a sink of ln 3 has weight 1/4; the sink alone takes all weight."""
    query = torch.zeros(1, 1, 2, 1, device=device)
    value = torch.tensor([[[[8.0]]]], device=device)
    sinks = torch.tensor([math.log(3.0)], device=device)
    mask = torch.tensor([[True], [False]], device=device)
    output, logsumexp = torch.ops.foo.attention(query, value * 0, value, mask, None, sinks)
    assert output.flatten().tolist() == pytest.approx([2.0, 0.0], rel=1e-6)
    assert logsumexp.flatten().tolist() == pytest.approx([math.log(4.0), math.log(3.0)], rel=1e-6)


def test_softcap_by_hand(device):
    """The soft cap applies to the scaled product, before the bias is added."""
    one = torch.ones(1, 1, 1, 1, device=device)
    bias = torch.tensor([10.0], device=device)
    _, logsumexp = torch.ops.foo.attention(one, one, one, bias, scale=3.0, softcap=2.0)
    assert logsumexp.item() == pytest.approx(2 * math.tanh(1.5) + 10, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_dense(dtype, device):
    sample = ATTENTION.samples["no options"](dtype)
    for given in (sample, sample.map(reversed_dimensions)):
        output, logsumexp = call(given, device)
        assert output.is_contiguous() or output.transpose(1, 2).is_contiguous()
        assert logsumexp.is_contiguous()
        assert output.dtype == dtype
        assert logsumexp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_heads_and_rows_lie_in_memory_as_those_of_query(device):
    """A model that transposed its heads to the front can transpose them back and view."""
    query, key, value = (torch.randn(2, 9, 4, 8).to(device).transpose(1, 2) for _ in range(3))
    output = foo_ops.attention(query, key, value)
    assert output.stride() == query.stride()
    assert output.transpose(1, 2).view(2, 9, 32).data_ptr() == output.data_ptr()
    inputs = (tensor.contiguous() for tensor in (query, key, value))
    contiguous = foo_ops.attention(*inputs)
    assert contiguous.is_contiguous()
    assert torch.equal(output, contiguous)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing_are_zero(dtype, is_causal, device):
    """Freed memory full of NaN shows whether these rows are written at all."""
    mask = torch.ones(70, 70, dtype=torch.bool)
    mask[[0, 5, 63, 64, 69]] = False
    sample = attention_sample(queries=70, keys=70, bias=lambda _: mask, is_causal=is_causal)(dtype)
    for _ in range(3):
        junk = [torch.full((2, 2, 70, 16), math.nan, dtype=dtype, device=device) for _ in range(4)]
        del junk
        leaves = sample.to(device).requiring_grad()
        output, logsumexp = leaves.call(ATTENTION.operator)
        blind = ~mask.any(-1)
        assert (output[:, :, blind] == 0).all()
        assert (logsumexp[:, :, blind] == -math.inf).all()
        assert logsumexp[:, :, ~blind].isfinite().all()
        (output.sum() + logsumexp.sum()).backward()
        assert (leaves.inputs[0].grad[:, :, blind] == 0).all()
        assert all(tensor.grad.isfinite().all() for tensor in leaves.differentiable())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", range(4), ids=["query", "key", "value", "attn_bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_go_where_they_belong(dtype, position, value, device):
    """NaN and infinity reach only the rows and columns that depend on them, as in the reference."""
    # A hidden value has weight zero, and zero times NaN is NaN, unless its whole tile is skipped.
    is_causal = position != 2
    bias = random_bias(2, 2, 70, 70)
    sample = attention_sample(queries=70, keys=70, is_causal=is_causal, bias=bias)(dtype)
    sample.inputs[position][1, 0, 66, 3] = value
    outputs = call(sample, device)
    testing.check_outputs(ATTENTION, sample, dtype, outputs)
    output, logsumexp = outputs
    assert output[0].isfinite().all()
    assert output[1, 1].isfinite().all()
    if is_causal:
        assert output[1, 0, :66].isfinite().all()
        assert logsumexp[1, 0, :66].isfinite().all()
    else:
        assert output[1, 0, :, :3].isfinite().all()
        assert logsumexp.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", range(4), ids=["query", "key", "value", "attn_bias"])
@pytest.mark.parametrize("keys", [20, 21, 1501])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_with_few_queries(dtype, keys, position, value, device):
    """The value is in the last key, which may be half of a pair, or in one of two key splits."""
    sample = attention_sample(queries=2, keys=keys, bias=random_bias(2, 2, 2, keys))(dtype)
    row = 1 if position in (0, 3) else keys - 1
    sample.inputs[position][1, 0, row, 3] = value
    outputs = call(sample, device)
    testing.check_outputs(ATTENTION, sample, dtype, outputs)
    assert outputs[0][0].isfinite().all()
    assert outputs[0][1, 1].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [4, 5], ids=["alibi_slopes", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_in_what_a_head_has(dtype, position, value, device):
    """No query sees the key at its own position, where 0 times an infinite slope would be NaN."""
    make = attention_sample(
        queries=69, keys=70, slopes=random_slopes(2), sinks=random_bias(2), is_causal=True
    )
    sample = make(dtype)
    sample.inputs[position][1] = value
    outputs = call(sample, device)
    testing.check_outputs(ATTENTION, sample, dtype, outputs)
    assert all(output[:, 0].isfinite().all() for output in outputs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("queries", [2, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_that_a_mask_hides_may_be_anything(dtype, queries, value, device):
    mask = torch.ones(queries, 70, dtype=torch.bool)
    mask[:, 66] = False
    sample = attention_sample(queries=queries, keys=70, bias=lambda _: mask)(dtype)
    sample.inputs[1][:, :, 66] = value
    outputs = call(sample, device)
    testing.check_outputs(ATTENTION, sample, dtype, outputs)
    assert all(output.isfinite().all() for output in outputs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", range(2), ids=["query", "key"])
def test_softcap_makes_infinite_scores_finite(position, value, device):
    sample = attention_sample(queries=70, keys=70, softcap=3.0)(torch.float32)
    sample.inputs[position][1, 0, 66, 3] = value
    outputs = call(sample, device)
    testing.check_outputs(ATTENTION, sample, torch.float32, outputs)
    assert outputs[0].isfinite().all() == math.isinf(value)


def in_odd_rows(tensor):
    room = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)
    room[..., :-1] = tensor
    return room[..., :-1]


def with_columns_apart(tensor):
    return tensor.mT.contiguous().mT


@pytest.mark.parametrize("lay_out", [in_odd_rows, with_columns_apart])
@pytest.mark.parametrize("dtype", ATTENTION.dtypes, ids=str)
def test_strides_of_whole_vectors(dtype, lay_out, device):
    """The sizes would allow reading all rows in place; the strides do not."""
    make = attention_sample(
        batch=1, heads=2, queries=128, keys=128, head_dim=64, value_dim=64, is_causal=True
    )
    sample = make(dtype).to(device).map(lay_out).requiring_grad()
    outputs = sample.call(ATTENTION.operator)
    testing.check_outputs(ATTENTION, sample, dtype, outputs)
    cotangents = tuple(lay_out(tensor) for tensor in testing.cotangents_for(outputs))
    gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
    testing.check_gradients(ATTENTION, sample, gradients, cotangents)


def beside_nan(tensor):
    """Lay rows out at even strides, with NaN between them."""
    columns = tensor.shape[-1]
    room = tensor.new_full((*tensor.shape[:-1], columns + 2 + columns % 2), math.nan)
    room[..., :columns] = tensor
    return room[..., :columns]


@pytest.mark.parametrize("keys", [1, 6, 131])
@pytest.mark.parametrize(("heads", "queries"), [(2, 1), (8, 1), (4, 3)])
@pytest.mark.parametrize("dims", [(4, 2), (20, 36), (80, 72), (6, 130)], ids=str)
@pytest.mark.parametrize("dtype", ATTENTION.dtypes, ids=str)
def test_few_queries_read_columns_of_their_rows_only(dtype, dims, heads, queries, keys, device):
    """Rows that are no whole vectors are read in place, where loads have masks."""
    head_dim, value_dim = dims
    sample = attention_sample(
        batch=1, heads=heads, key_heads=2, queries=queries, keys=keys, head_dim=head_dim,
        value_dim=value_dim, is_causal=True,
    )(dtype).to(device).map(beside_nan)  # fmt: skip
    testing.check_outputs(ATTENTION, sample, dtype, sample.call(ATTENTION.operator))


def test_one_tensor_as_query_key_and_value(device):
    x = torch.randn(1, 2, 6, 4, dtype=torch.float64).to(device).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: foo_ops.attention(t, t, t, is_causal=True), x)


def test_change_of_a_saved_tensor_is_noticed(device):
    for position in range(5):
        leaves = attention_sample(bias=random_bias(9, 11))(torch.float32).to(device)
        inputs = [tensor.requires_grad_() * 1 for tensor in leaves.inputs[:4]]
        output, _ = torch.ops.foo.attention(*inputs)
        with torch.no_grad():
            [*inputs, output][position].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_backward_twice(device):
    sample = attention_sample()(torch.float32).to(device).requiring_grad()
    output, _ = sample.call(ATTENTION.operator)
    first = torch.autograd.grad(output.sum(), sample.differentiable(), retain_graph=True)
    second = torch.autograd.grad(output.sum(), sample.differentiable())
    assert all(map(torch.equal, first, second))


def test_gradient_of_a_bias_is_summed_over_what_it_was_broadcast_to(device):
    """The reference sums the float64 gradient of the full bias."""
    sample = attention_sample(heads=4, key_heads=2, queries=66, keys=67)(torch.float64).to(device)
    full = random("full bias", (2, 4, 66, 67), dtype=torch.float64)[0].to(device)
    for shape in [(2, 4, 66, 67), (1, 4, 1, 67), (2, 1, 66, 1), (66, 67), (4, 1, 1), (67,), ()]:
        bias = full.sum_to_size(shape).div(100).requires_grad_()
        expanded = bias.detach().expand(full.shape).clone().requires_grad_()
        gradients = []
        for tensor in (bias, expanded):
            output, logsumexp = torch.ops.foo.attention(*sample.inputs[:3], tensor)
            (output.square().sum() + logsumexp.square().sum()).backward()
            gradients.append(tensor.grad)
        expected = gradients[1].sum_to_size(shape)
        torch.testing.assert_close(gradients[0], expected, rtol=1e-10, atol=1e-12)


def test_a_causal_mask_may_leave_nothing_of_a_window(device):
    """The causal mask is aligned to the upper left, the window to the lower right."""
    sample = attention_sample(queries=40, keys=70, is_causal=True, window_left=5)(torch.float32)
    sample = sample.to(device).requiring_grad()
    output, logsumexp = sample.call(ATTENTION.operator)
    assert torch.equal(output, torch.zeros_like(output))
    assert torch.equal(logsumexp, torch.full_like(logsumexp, -math.inf))
    gradients = torch.autograd.grad(output.sum(), sample.differentiable())
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_infinite_gradient_of_the_output_stays_in_its_place(dtype):
    query, key, value = (torch.randn(1, 2, 70, 64).to(dtype).requires_grad_() for _ in range(3))
    grad_output = torch.randn(1, 2, 70, 64).to(dtype)
    grad_output[0, 0, 7, 3] = math.inf
    output, _ = torch.ops.foo.attention(query, key, value)
    grad_query, grad_key, grad_value = torch.autograd.grad(output, (query, key, value), grad_output)
    assert (grad_value[0, 0, :, 3] == math.inf).all()
    grad_value[0, 0, :, 3] = 0
    assert grad_value.isfinite().all()
    grad_query[0, 0, 7] = 0
    assert grad_query.isfinite().all()
    assert not grad_key[0, 0].isfinite().any()
    assert grad_key[0, 1].isfinite().all()
