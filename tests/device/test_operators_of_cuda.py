"""Further operators that torch has for CUDA alone: matrix products, dropout, norms."""

import pytest
import torch
from support.exact import assert_near
from torch.nn.functional import ScalingType, scaled_grouped_mm
from torch.sparse import to_sparse_semi_structured

aten = torch.ops.aten
FLOAT8 = torch.float8_e4m3fn


def random(*sizes, dtype=torch.float32):
    return torch.randn(*sizes).to(dtype)


# --------------------------------------------------------------------------------- matrix products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_products_in_float32(name, dtype):
    """Products of 16-bit numbers are float32, without rounding to 16 bits in between."""
    torch.manual_seed(0)
    batch = (3,) if "bmm" in name else ()
    left, right = random(*batch, 33, 70, dtype=dtype), random(*batch, 70, 20, dtype=dtype)
    added = [random(*batch, 33, 20)] if name.startswith(("add", "badd")) else []
    function = getattr(torch, name)
    options = {"beta": 0.5, "alpha": 2.0} if added else {}
    result = function(
        *(each.foo() for each in (*added, left, right)), out_dtype=torch.float32, **options
    )
    exact = function(*(each.double() for each in (*added, left, right)), **options)
    assert result.dtype == torch.float32
    assert_near(result, exact)
    out = torch.empty(0, device="foo")
    function(
        *(each.foo() for each in (*added, left, right)), out_dtype=torch.float32, out=out, **options
    )
    assert out.equal(result)
    with pytest.raises(TypeError, match=f"{name}: out_dtype must be the dtype of the matrices"):
        function(
            *(each.foo() for each in (*added, left, right)), out_dtype=torch.float64, **options
        )


def products_of_groups(left, right, ends):
    """Return each group's product; 2-D operands split rows, columns, or the summed dimension."""
    starts = [0, *ends[:-1]]
    spans = list(zip(starts, ends))
    if left.dim() == 2 and right.dim() == 2:
        return torch.stack([left[:, a:b] @ right[a:b] for a, b in spans])
    if left.dim() == 2:
        return torch.cat([left[a:b] @ right[i] for i, (a, b) in enumerate(spans)])
    if right.dim() == 2:
        return torch.cat([left[i] @ right[:, a:b] for i, (a, b) in enumerate(spans)], 1)
    return left @ right


GROUPS = {
    "rows": ((48, 32), (3, 32, 16)),
    "sums": ((16, 48), (48, 32)),
    "columns": ((3, 16, 32), (32, 48)),
    "batches": ((3, 16, 32), (3, 32, 16)),
}
ENDS = [16, 16, 48]


def group_inputs(kind, dtype):
    torch.manual_seed(0)
    left, right = GROUPS[kind]
    right = random(*right[:-2], right[-1], right[-2]).to(dtype).mT
    ends = None if kind == "batches" else torch.tensor(ENDS, dtype=torch.int32)
    return random(*left).to(dtype), right, ends


@pytest.mark.parametrize("kind", GROUPS)
def test_grouped_mm_and_gradients(kind):
    """The gradient of a sum has zero strides, which torch's own kernel refuses."""
    left, right, ends = group_inputs(kind, torch.bfloat16)
    there = [each.foo().requires_grad_() for each in (left, right)]
    result = torch.nn.functional.grouped_mm(*there, offs=ends if ends is None else ends.foo())
    exact = [each.double().requires_grad_() for each in (left, right)]
    expected = products_of_groups(*exact, ENDS)
    assert_near(result, expected.detach(), torch.bfloat16)
    result.sum().backward()
    expected.sum().backward()
    for one, other in zip(there, exact):
        assert_near(one.grad, other.grad, torch.bfloat16)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", GROUPS)
def test_scaled_grouped_mm(kind, version):
    left, right, ends = group_inputs(kind, FLOAT8)
    groups = len(ENDS)
    rows = (groups * left.size(-2),) if kind == "sums" else left.shape[:-1]
    columns = (
        (groups * right.size(-1),)
        if kind == "sums"
        else (right.size(-1),)
        if right.dim() == 2
        else (groups, right.size(-1))
    )
    scales = [torch.rand(rows) + 0.5, torch.rand(columns) + 0.5]
    offs = ends if ends is None else ends.foo()
    if version == 1:
        result = torch._scaled_grouped_mm(
            left.foo(), right.foo(), *(each.foo() for each in scales), offs=offs
        )
    else:
        row_wise = ScalingType.RowWise
        result = scaled_grouped_mm(
            left.foo(), right.foo(), scales[0].foo(), row_wise, scales[1].foo(), row_wise, offs=offs
        )
    a, b = (each.double() for each in scales)
    if kind == "sums":
        # Each group has its own scale factors.
        expected = products_of_groups(left.double(), right.double(), ENDS)
        expected = expected * a.view(groups, -1, 1) * b.view(groups, 1, -1)
    else:
        expected = products_of_groups(
            left.double() * a[..., None], right.double() * b.unsqueeze(-2), ENDS
        )
    assert result.dtype == torch.bfloat16
    assert_near(result, expected, roundings=1)


def quantised_weight(outputs, inputs, group):
    numbers = torch.randint(16, (outputs, inputs))
    factors = torch.randn(inputs // group, outputs, 2).bfloat16()
    scale, zero = (each.T.repeat_interleave(group, 1).double() for each in factors.unbind(-1))
    return numbers, factors, (numbers.double() - 8) * scale + zero


@pytest.mark.parametrize("inner_tiles", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_in_four_bits(inner_tiles, dtype):
    torch.manual_seed(0)
    numbers, factors, weight = quantised_weight(24, 256, 64)
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(pairs.foo(), inner_tiles)
    assert packed.shape == (3, 256 // (16 * inner_tiles), 32, inner_tiles // 2)
    x = random(7, 256, dtype=dtype)
    result = torch._weight_int4pack_mm(x.foo(), packed, 64, factors.foo())
    assert result.dtype == dtype
    assert_near(result, x.double() @ weight.T)


def test_order_of_weights_in_four_bits():
    """A word holds what one lane of CUDA's kernel loads: model files have this order."""
    for row, column, lane, word, bits in [
        (0, 0, 0, 0, 0),  # the first number of a pair is in the lower half of the word
        (0, 1, 0, 0, 16),
        (0, 2, 1, 0, 0),  # the next pair belongs to the next lane
        (0, 8, 0, 0, 4),  # the fourth pair after it to the same lane
        (0, 16, 0, 0, 8),  # and so does the second tile
        (0, 25, 0, 0, 28),
        (1, 0, 4, 0, 0),  # a row has four lanes
        (7, 39, 31, 1, 16),  # two tiles make a word
    ]:
        numbers = torch.zeros(8, 64, dtype=torch.int64)
        numbers[row, column] = 15
        pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
        packed = torch._convert_weight_to_int4pack(pairs.foo(), 4).cpu()
        assert packed.count_nonzero() == 1
        found = packed[0, 0, lane, word].item() % 2**32
        assert found == 15 << bits, (row, column)


def test_refusals_of_products():
    words = torch.zeros(1, 2, 32, 1, dtype=torch.int32, device="foo")
    factors = torch.zeros(2, 8, 2, dtype=torch.bfloat16, device="foo")
    x = torch.zeros(3, 64, dtype=torch.bfloat16, device="foo")
    for match, call in {
        "_weight_int4pack_mm: qGroupSize must be 32, 64, 128 or 256, got 16": lambda: (
            torch._weight_int4pack_mm(x, words, 16, factors)
        ),
        "_weight_int4pack_mm: self must have 64 columns as mat2 has, got 32": lambda: (
            torch._weight_int4pack_mm(x[:, :32], words, 32, factors)
        ),
        r"_weight_int4pack_mm: qScaleAndZeros must have sizes \[1, 8, 2\]": lambda: (
            torch._weight_int4pack_mm(x, words, 64, factors)
        ),
        "_convert_weight_to_int4pack: innerKTiles must be 2, 4 or 8, got 3": lambda: (
            torch._convert_weight_to_int4pack(x.to(torch.uint8), 3)
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="self must be of dtype float8_e4m3fn, got BFloat16"):
        torch._scaled_grouped_mm(x, x.t(), x[0], x[0])


def test_compiled_products(fresh_compiler):
    """Only for CUDA does Inductor have products with a different result dtype."""
    torch.manual_seed(0)
    left, right = random(33, 70, dtype=torch.bfloat16), random(70, 20, dtype=torch.bfloat16)

    @torch.compile(fullgraph=True)
    def function(left, right):
        product = torch.mm(left, right, out_dtype=torch.float32)
        batch = torch.bmm(left[None], right[None], out_dtype=torch.float32)
        total = torch.addmm(product, left, right, out_dtype=torch.float32, beta=0.5, alpha=2)
        return product, total + batch

    product, total = function(left.foo(), right.foo())
    exact = left.double() @ right.double()
    assert_near(product, exact)
    assert_near(total, (3.5 * exact)[None])


# -------------------------------------------------------------------------------- dropout and norms


def test_fused_dropout():
    """`p` is the probability to keep an element."""
    x = torch.randn(1000, device="foo", requires_grad=True)
    torch.manual_seed(0)
    result, mask = torch._fused_dropout(x, 0.7)
    torch.manual_seed(0)
    assert torch._fused_dropout(x, 0.7)[1].equal(mask)
    assert mask.dtype == torch.uint8
    assert 0.65 < mask.float().mean().item() < 0.75
    expected = x.detach().double() * mask / 0.7
    assert_near(result, expected.cpu())
    result.sum().backward()
    assert_near(x.grad, (mask.double() / 0.7).cpu())
    generator = torch.Generator("foo").manual_seed(1)
    drawn = torch._fused_dropout(x, 0.7, generator)[1]
    assert torch._fused_dropout(x, 0.7, generator.manual_seed(1))[1].equal(drawn)
    assert torch._fused_dropout(x, 0.0)[0].count_nonzero() == 0
    with pytest.raises(TypeError, match="mask must be of dtype uint8, got Float"):
        torch._masked_scale(x, x, 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_rms_norm_backward(shape, dtype):
    torch.manual_seed(0)
    x, grad, weight = random(5, 3, 8, dtype=dtype), random(5, 3, 8, dtype=dtype), random(*shape)
    weight = weight.to(dtype)
    _, rstd = torch._fused_rms_norm(x.foo(), shape, weight.foo(), 1e-5)
    found = aten._fused_rms_norm_backward(
        grad.foo(), x.foo(), shape, rstd, weight.foo(), [True, True]
    )
    exact = [each.double().requires_grad_() for each in (x, weight)]
    torch.nn.functional.rms_norm(exact[0], shape, exact[1], 1e-5).backward(grad.double())
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert_near(one, other.grad)
    assert aten._fused_rms_norm_backward(grad.foo(), x.foo(), shape, rstd, None, [False, True]) == (
        None,
        None,
    )


def test_batch_norm_elemt_writes_to_out():
    x = torch.randn(4, 3, 5, device="foo")
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    out = torch.empty(0, device="foo")
    result = torch.batch_norm_elemt(x, None, None, mean, invstd, 1e-5, out=out)
    assert result is out
    assert out.equal(torch.batch_norm_elemt(x, None, None, mean, invstd, 1e-5))


# ----------------------------------------------------------------------------------------- refusals


def test_losses_of_cudnn_are_not_used():
    probabilities = torch.randn(5, 2, 3, device="foo")
    targets = torch.ones(4, dtype=torch.int32)
    assert not torch._use_cudnn_ctc_loss(probabilities, targets, [5, 5], [2, 2], 0)


def test_refused_operators_say_what_to_use():
    x = torch.zeros(1, 4, 8, 8, device="foo")
    none = " has no kernel for foo, and none for cpu that could run instead: use "
    with pytest.raises(NotImplementedError) as caught:
        torch.cudnn_convolution(x, x, [1, 1], [1, 1], [1, 1], 1, False, False, False)
    assert str(caught.value).splitlines()[0] == (
        f"aten::cudnn_convolution{none}torch.nn.functional.conv2d and its kind"
    )
    with pytest.raises(NotImplementedError, match=none + "the dense tensor"):
        aten._to_sparse_semi_structured(x[0, 0])
    with pytest.raises(RuntimeError, match="Only CUDA tensors"):
        to_sparse_semi_structured(x[0, 0].bfloat16())
