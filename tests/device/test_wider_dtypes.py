"""Dtypes that operators support on CUDA and not on the CPU, which conformance does not cover."""

import pytest
import torch
from support.exact import assert_near

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def complex_numbers(*sizes):
    torch.manual_seed(0)
    return torch.randn(*sizes, dtype=torch.complex64).to(torch.complex32)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_counts_of_integers(dtype):
    """The last bin includes its upper end, and numbers outside of all bins are not counted."""
    values = torch.tensor([0, 1, 1, 5, 9, 10, 11, 100], dtype=dtype)
    counts = torch.histc(values.foo(), bins=5, min=0, max=10)
    assert counts.dtype == dtype
    assert counts.tolist() == [3, 0, 1, 0, 2]
    assert torch.histc(values.foo()[:0], bins=2).tolist() == [0, 0]
    assert torch.histc(values.foo()[1:3], bins=4).sum() == 2
    assert torch.histc(values.foo()[:4], bins=3).tolist() == [3, 0, 1]


def test_counts_are_exact_beyond_float64():
    """Neighbours that are equal in float64 get bins of their own."""
    start = 2**62
    values = torch.tensor([start + each for each in (0, 1, 1, 3)], device="foo")
    assert torch.histc(values, bins=4, min=start, max=start + 4).tolist() == [1, 2, 0, 1]
    edge = torch.tensor([2**60 - 1, 2**60], device="foo")
    assert torch.histc(edge, bins=4, min=0, max=2**62).tolist() == [1, 1, 0, 0]
    limits = torch.iinfo(torch.int64)
    ends = torch.tensor([limits.min, 0, limits.max], device="foo")
    assert torch.histc(ends, bins=2).tolist() == [1, 2]


def test_counts_wrap_around_as_on_cuda():
    values = torch.zeros(300, dtype=torch.uint8, device="foo")
    assert torch.histc(values, bins=1, min=0, max=1).tolist() == [300 - 256]


def test_counts_of_integers_refuse_as_on_cuda():
    values = torch.arange(4, device="foo")
    with pytest.raises(RuntimeError, match="bins must be > 0"):
        torch.histc(values, bins=0)
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(values, min=3, max=1)
    with pytest.raises(RuntimeError, match="not implemented for 'Bool'"):
        torch.histc(values == 1)


def test_out_and_in_place():
    x = complex_numbers(4, 5)
    exact = x.to(torch.complex128).exp()
    result = x.foo().exp()
    assert_near(torch.view_as_real(result), torch.view_as_real(exact), roundings=1)
    written = x.foo()
    assert written.exp_() is written
    assert written.equal(result)
    assert written._version == 1
    out = torch.empty(0, dtype=torch.complex32, device="foo")
    assert torch.exp(x.foo(), out=out) is out
    assert out.equal(result)
    wide = torch.empty(4, 5, dtype=torch.complex64, device="foo")
    torch.exp(x.foo(), out=wide)
    assert_near(torch.view_as_real(wide), torch.view_as_real(exact))
    itself = x.foo()
    torch.exp(itself, out=itself)
    assert itself.equal(result)


def test_views_are_written():
    base = complex_numbers(6, 4).foo()
    expected = base.clone()
    base[1::2].T.sqrt_()
    assert base[::2].equal(expected[::2])
    assert base[1::2].equal(expected[1::2].sqrt())
    with pytest.raises(RuntimeError, match="more than one element"):
        torch.exp(base, out=base[:1].expand(6, 4))
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.exp(base[:-1], out=base[1:])


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(3, -1),
        lambda x: x.conj(),
        lambda x: x[0, 0],
        lambda x: x[:0],
    ],
)
def test_layouts(layout):
    x = layout(complex_numbers(4, 6).foo())
    result = x.sin()
    reference = layout(complex_numbers(4, 6).to(torch.complex64)).sin()
    assert result.stride() == reference.stride()
    assert result.equal(reference.to(torch.complex32).foo())


def test_common_dtypes():
    """All operands decide the result's dtype, even where only a number is complex."""
    half, x = torch.rand(5).half().foo(), complex_numbers(5).foo()
    for found, dtype in [
        (x.div(half), torch.complex32),
        (half.pow(2j), torch.complex32),
        (x.pow(torch.rand(5, device="foo")), torch.complex64),
        (x.pow(torch.tensor(2.0, dtype=torch.float64)), torch.complex32),
        (x.sum(dtype=torch.complex64), torch.complex64),
        (x.to(torch.complex64).sum(dtype=torch.complex32), torch.complex32),
        (x.abs(), torch.float16),
        (x.angle(), torch.float16),
        (torch.tensor([True, False], device="foo").abs(), torch.bool),
        (torch.eye(3, dtype=torch.bool, device="foo").trace(), torch.int64),
        (torch.fft.rfft(half), torch.complex32),
        (torch.fft.irfft(x), torch.float16),
    ]:
        assert found.dtype == dtype
    assert torch.eye(3, dtype=torch.bool, device="foo").trace().item() == 3


def test_a_sum_is_rounded_once():
    """A sum of 4096 numbers of 1.001 would stop at 4096 in half precision."""
    x = torch.full((4096,), 1.001, dtype=torch.complex64).to(torch.complex32)
    exact = x.to(torch.complex128).sum().real
    assert abs(x.foo().sum().real.item() - exact) <= 2


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_nansum(dtype):
    x = complex_numbers(3, 4).to(torch.complex128)
    x[0, 1], x[2, 3] = complex(torch.nan, 1), complex(1, torch.nan)
    x = x.to(dtype)
    exact = x.to(torch.complex128).nan_to_num(0)
    exact[0, 1] = exact[2, 3] = 0
    found = x.foo().nansum(1, keepdim=True)
    assert found.dtype == dtype
    assert_near(
        torch.view_as_real(found), torch.view_as_real(exact.sum(1, keepdim=True)), roundings=2
    )
    out = torch.empty(0, dtype=dtype, device="foo")
    torch.nansum(x.foo(), 1, keepdim=True, out=out)
    assert out.equal(found)


def test_transforms_in_half_precision():
    torch.manual_seed(0)
    x = torch.randn(3, 12).half()
    there, exact = x.foo().requires_grad_(), x.double().requires_grad_()
    found, expected = torch.fft.rfft2(there, norm="ortho"), torch.fft.rfft2(exact, norm="ortho")
    assert_near(torch.view_as_real(found), torch.view_as_real(expected).detach())
    found.abs().float().sum().backward()
    expected.abs().sum().backward()
    assert_near(there.grad, exact.grad)
    out = torch.empty(0, dtype=torch.complex32, device="foo")
    torch.fft.rfft2(x.foo(), norm="ortho", out=out)
    assert out.equal(found)
    with pytest.raises(RuntimeError, match="Unsupported dtype BFloat16"):
        torch.fft.fft(x.bfloat16().foo())


def test_compiled(fresh_compiler):
    @torch.compile(fullgraph=True)
    def function(numbers, x):
        return torch.histc(numbers, bins=4, min=0, max=3), torch.nn.functional.avg_pool3d(x, 2)

    numbers, x = torch.tensor([0, 3, 3, 1]).foo(), torch.rand(1, 2, 4, 4, 4).half().foo()
    counts, pooled = function(numbers, x)
    assert counts.tolist() == [1, 1, 0, 2]
    assert pooled.equal(torch.nn.functional.avg_pool3d(x, 2))
