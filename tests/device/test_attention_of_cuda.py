"""Attention operators that torch has for CUDA alone: values, gradients, fake results."""

import math

import pytest
import torch
from support.exact import assert_near
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
BATCH, HEADS, QUERIES, KEYS, SIZE = 2, 4, 5, 9, 16


def exact_attention(query, key, value, mask=None, bias=None):
    """Return output and logsumexp in float64; a row that sees nothing has output 0."""
    query, key, value = (each.double() for each in (query, key, value))
    key, value = (each.repeat_interleave(query.size(1) // key.size(1), 1) for each in (key, value))
    scores = query @ key.mT / math.sqrt(query.size(-1))
    if bias is not None:
        scores = scores + bias.double()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value, scores.logsumexp(-1)


def lower_right(queries, keys, left=None, right=0):
    """Return a window's mask, aligned to the last key."""
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if right is not None:
        mask &= distance <= right
    if left is not None:
        mask &= distance >= -left
    return mask


def upper_left(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def make_inputs(dtype, *, heads_first, key_heads=HEADS):
    torch.manual_seed(0)
    shapes = [(QUERIES, HEADS), (KEYS, key_heads), (KEYS, key_heads)]
    tensors = [torch.randn(BATCH, length, heads, SIZE, dtype=dtype) for length, heads in shapes]
    return [each.transpose(1, 2) if heads_first else each for each in tensors]


def check_announced(operator, results, *args, **kwargs):
    """Fake results have the same layouts, except the numbers that hold a generator's state."""
    mode = FakeTensorMode()
    args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    with mode:
        announced = operator(*args, **kwargs)

    def layouts(values):
        return [
            (each.dtype, each.shape, each.stride()) if isinstance(each, torch.Tensor) else each
            for each in values
        ]

    assert layouts(results) == layouts(announced)


def check(operator, inputs, expected, dtype, *args, heads_first, **kwargs):
    """Compare an operator's output, logsumexp and gradients with those of a formula."""
    there = [each.foo().requires_grad_() for each in inputs]
    results = operator(*there, *args, **kwargs)
    check_announced(operator, results, *there, *args, **kwargs)
    exact_inputs = [each.double().requires_grad_() for each in inputs]
    output, logsumexp = expected(
        *(each if heads_first else each.transpose(1, 2) for each in exact_inputs)
    )
    output = output if heads_first else output.transpose(1, 2)
    assert_near(results[0], output.detach(), dtype, roundings=8)
    found = results[1].cpu().squeeze(-1) if results[1].size(-1) == 1 else results[1].cpu()
    assert_near(found[..., : logsumexp.size(-1)], logsumexp.detach(), roundings=64)
    assert found[..., logsumexp.size(-1) :].isinf().all()
    weight = torch.randn_like(output)
    gradients = torch.autograd.grad(results[0], there, weight.to(dtype).foo())
    exact = torch.autograd.grad(output, exact_inputs, weight.to(dtype).double())
    for one, other, tensor in zip(gradients, exact, there, strict=True):
        assert one.dtype == dtype
        assert one.shape == tensor.shape
        assert_near(one, other, dtype, roundings=16)
    return results


FLASH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@FLASH_DTYPES
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_product_flash_attention(dtype, is_causal):
    mask = lower_right(QUERIES, KEYS) if is_causal else None
    results = check(
        aten._scaled_dot_product_flash_attention,
        make_inputs(dtype, heads_first=True),
        lambda *inputs: exact_attention(*inputs, mask),
        dtype,
        0.0,
        is_causal,
        heads_first=True,
    )
    assert results[4:6] == (QUERIES, KEYS)
    assert results[6].dtype == torch.uint64


@FLASH_DTYPES
@pytest.mark.parametrize("window", [{}, {"window_size_left": 3, "window_size_right": 1}])
def test_flash_attention_forward(dtype, window):
    mask = lower_right(QUERIES, KEYS, 3, 1) if window else lower_right(QUERIES, KEYS)
    check(
        aten._flash_attention_forward,
        make_inputs(dtype, heads_first=False, key_heads=2),
        lambda *inputs: exact_attention(*inputs, mask),
        dtype,
        *(None, None, QUERIES, KEYS, 0.0, not window, False),
        heads_first=False,
        **window,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_product_efficient_attention(dtype, is_causal):
    mask = upper_left(QUERIES, KEYS) if is_causal else None
    check(
        aten._scaled_dot_product_efficient_attention,
        make_inputs(dtype, heads_first=True),
        lambda *inputs: exact_attention(*inputs, mask),
        dtype,
        *(None, True, 0.0, is_causal),
        heads_first=True,
    )


@FLASH_DTYPES
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_product_cudnn_attention(dtype, is_causal):
    mask = upper_left(QUERIES, KEYS) if is_causal else None
    check(
        aten._scaled_dot_product_cudnn_attention,
        make_inputs(dtype, heads_first=True),
        lambda *inputs: exact_attention(*inputs, mask),
        dtype,
        *(None, True, 0.0, is_causal),
        heads_first=True,
    )


MASKS = {0: lambda *sizes: None, 1: upper_left, 2: lower_right}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mask_type", MASKS)
def test_efficient_attention_forward(dtype, mask_type):
    check(
        aten._efficient_attention_forward,
        make_inputs(dtype, heads_first=False),
        lambda *inputs: exact_attention(*inputs, MASKS[mask_type](QUERIES, KEYS)),
        dtype,
        *(None, None, None, None, None, 0.0, mask_type, True),
        heads_first=False,
    )


def test_efficient_attention_with_a_window_and_used_keys():
    query, key, value = make_inputs(torch.float32, heads_first=False)
    used = torch.tensor([4, 9], dtype=torch.int32)
    output, *_ = aten._efficient_attention_forward(
        *(each.foo() for each in (query, key, value)),
        *(None, None, None, None, None, 0.0, 2),
        seqlen_k=used.foo(),
        window_size=3,
    )
    for row, length in enumerate(used.tolist()):
        exact, _ = exact_attention(
            query[row : row + 1].transpose(1, 2),
            key[row : row + 1, :length].transpose(1, 2),
            value[row : row + 1, :length].transpose(1, 2),
            lower_right(QUERIES, length, 2),
        )
        assert_near(output[row : row + 1].transpose(1, 2), exact, torch.float32)


@pytest.mark.parametrize("mask_type", MASKS)
def test_efficient_attention_of_packed_sequences(mask_type):
    """Each sequence has its own mask, and its own row of the bias and of the logsumexp."""
    torch.manual_seed(0)
    lengths = [(3, 5), (6, 2)]
    query, key, value = (torch.randn(1, total, HEADS, SIZE) for total in (9, 7, 7))
    bias = torch.randn(2, HEADS, 6, 5)
    inputs = [each.foo().requires_grad_() for each in (query, key, value, bias)]
    starts = [torch.tensor([0, *each], dtype=torch.int32).foo() for each in ((3, 9), (5, 7))]
    results = aten._efficient_attention_forward(*inputs, *starts, 6, 5, 0.0, mask_type, True)
    check_announced(
        aten._efficient_attention_forward, results, *inputs, *starts, 6, 5, 0.0, mask_type, True
    )
    exact = [each.double().requires_grad_() for each in (query, key, value, bias)]
    outputs, first_q, first_k = [], 0, 0
    for row, (queries, keys) in enumerate(lengths):
        q = exact[0][:, first_q : first_q + queries]
        k, v = (each[:, first_k : first_k + keys] for each in exact[1:3])
        output, logsumexp = exact_attention(
            *(each.transpose(1, 2) for each in (q, k, v)),
            MASKS[mask_type](queries, keys),
            exact[3][row : row + 1, :, :queries, :keys],
        )
        assert_near(results[1][row, :, :queries], logsumexp[0].detach())
        outputs.append(output.transpose(1, 2))
        first_q, first_k = first_q + queries, first_k + keys
    output = torch.cat(outputs, 1)
    assert_near(results[0], output.detach())
    weight = torch.randn_like(output)
    gradients = torch.autograd.grad(results[0], inputs, weight.float().foo())
    for one, other in zip(
        gradients, torch.autograd.grad(output, exact, weight.float().double()), strict=True
    ):
        assert_near(one, other, torch.float32)
    assert gradients[3].stride(-2) == 16


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)])
def test_varlen_attn(window):
    """The public function for packed sequences runs on foo, with gradients."""
    torch.manual_seed(0)
    tensors = [torch.randn(9, heads, SIZE, dtype=torch.bfloat16) for heads in (HEADS, 2, 2)]
    there = [each.foo().requires_grad_() for each in tensors]
    starts = torch.tensor([0, 3, 9], dtype=torch.int32).foo()
    output, logsumexp = varlen_attn(
        *there, starts, starts, 6, 6, window_size=window, enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    exact = [each.double().requires_grad_() for each in tensors]
    left, right = (None if bound < 0 else bound for bound in window)
    parts = [
        exact_attention(
            *(each[first:last].transpose(0, 1)[None] for each in exact),
            lower_right(last - first, last - first, left, right),
        )
        for first, last in ((0, 3), (3, 9))
    ]
    expected = torch.cat([part[0].transpose(0, 1) for part, _ in parts])
    assert_near(output, expected.detach(), torch.bfloat16, roundings=8)
    assert_near(logsumexp, torch.cat([sums[0] for _, sums in parts], 1).detach(), roundings=64)
    weight = torch.randn_like(expected).bfloat16()
    gradients = torch.autograd.grad(output, there, weight.foo())
    for one, other in zip(gradients, torch.autograd.grad(expected, exact, weight.double())):
        assert_near(one, other, torch.bfloat16)


def test_keys_in_pages():
    """varlen_attn reads keys by a block table; each sequence has its number of used keys."""
    torch.manual_seed(0)
    query = torch.randn(2, HEADS, SIZE, dtype=torch.float16)
    pages = torch.randn(2, 4, 16, HEADS, SIZE, dtype=torch.float16)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    used = torch.tensor([20, 7], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    output = varlen_attn(
        *(each.foo() for each in (query, *pages, starts)), None, 1, 32,
        seqused_k=used.foo(), block_table=table.foo(),
    )  # fmt: skip
    for row, length in enumerate(used.tolist()):
        key, value = (each[table[row].long()].flatten(0, 1)[:length] for each in pages)
        exact, _ = exact_attention(
            *(each.transpose(0, 1)[None] for each in (query[row : row + 1], key, value))
        )
        assert_near(output[row : row + 1].transpose(0, 1)[None], exact, torch.float16, roundings=8)


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        (aten._scaled_dot_product_flash_attention, (0.5,)),
        (aten._scaled_dot_product_efficient_attention, (None, True, 0.5)),
        (aten._scaled_dot_product_cudnn_attention, (None, True, 0.5)),
    ],
)
def test_dropout(operator, options):
    """foo's generator draws the seed, and the backward pass drops the same weights."""
    query, key, _ = make_inputs(torch.bfloat16, heads_first=True)
    value = torch.eye(16, dtype=torch.bfloat16)[:KEYS].expand(BATCH, HEADS, KEYS, 16).foo()
    value.requires_grad_()
    before = torch.get_rng_state()

    def call():
        return operator(query.foo(), key.foo(), value, *options)[0]

    torch.manual_seed(3)
    weights = call()
    torch.manual_seed(3)
    assert call().equal(weights)
    assert not call().equal(weights)
    torch.set_rng_state(before)
    kept = (weights[..., :KEYS] != 0).double().mean().item()
    assert 0.3 < kept < 0.7
    # The value's gradient is the sum of the kept weights.
    (gradient,) = torch.autograd.grad(weights.sum(), value)
    assert_near(
        gradient[..., 0].cpu().float(),
        weights[..., :KEYS].detach().cpu().double().sum(-2),
        torch.bfloat16,
    )


def error_of(operator, dtype=torch.bfloat16, *args, **kwargs):
    query, key, value = (torch.zeros(1, 2, 4, 8, dtype=dtype, device="foo") for _ in range(3))
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        operator(query, key, value, *args, **kwargs)
    return type(caught.value), str(caught.value).splitlines()[0]


def test_refusals():
    efficient, flash = aten._efficient_attention_forward, aten._flash_attention_forward
    assert error_of(aten._scaled_dot_product_flash_attention, torch.float32) == (
        TypeError,
        "_scaled_dot_product_flash_attention: query must be of dtype float16 or bfloat16 as on "
        "CUDA, got Float",
    )
    assert error_of(flash, torch.bfloat16, None, None, 2, 2, 0.5, False, True) == (
        NotImplementedError,
        "_flash_attention_forward: return_debug_mask must be False on foo, got True",
    )
    none = (None, None, None, None, None)
    assert error_of(efficient, torch.bfloat16, *none, 0.0, 3) == (
        ValueError,
        "_efficient_attention_forward: custom_mask_type must be 0, 1 or 2, got 3",
    )
    assert error_of(efficient, torch.float64, *none, 0.0, 0) == (
        TypeError,
        "_efficient_attention_forward: query must be of dtype float32, float16 or bfloat16 as on "
        "CUDA, got Double",
    )
    used = torch.tensor([3], dtype=torch.int32, device="foo")
    assert error_of(efficient, torch.float32, *none, 0.0, 0, seqlen_k=used) == (
        ValueError,
        "_efficient_attention_forward: seqlen_k must be at most 2, got 3",
    )
