"""Elementwise kernels of bfloat16 read, round and write adjacent elements in pairs."""

import pytest
import torch

from foo_ops import library

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (*range(1, 36), 63, 64, 65, 127, 129, 1001)


@pytest.fixture(scope="module")
def operators():
    """Define the identity, a product with its negative, and an operator in place."""

    @library.numba_op("foo_test_pairs::identity")
    def identity(x: float) -> float:
        return x

    @library.numba_op("foo_test_pairs::products")
    def products(a: float, b: float) -> tuple[float, float]:
        return a * b, -(a * b)

    name = "foo_test_pairs::minus_twice_"
    library.define(name, "(Tensor(a!) a, Tensor b) -> Tensor(a!)")
    kernel = library.elementwise_kernel(lambda a, b: a - 2 * b, dtypes=(torch.bfloat16,))
    library.register_kernel(name, ("cpu", "foo"), kernel)
    return identity, products, torch.ops.foo_test_pairs.minus_twice_


def every_number():
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)


def bits(tensor):
    return tensor.cpu().view(torch.int16)


def same(actual, expected):
    """Return whether all elements are equal, with the signs of zeros, and NaN where expected."""
    actual, expected = actual.cpu(), expected.cpu()
    is_nan = expected.isnan()
    return torch.equal(actual.isnan(), is_nan) and torch.equal(
        bits(actual)[~is_nan], bits(expected)[~is_nan]
    )


@pytest.mark.parametrize("start", [0, 1], ids=["first halves first", "second halves first"])
def test_every_number_stays(operators, start, device):
    """A NaN keeps its payload but becomes quiet."""
    identity, _, _ = operators
    x = every_number()[start:]
    quiet = bits(x) | x.isnan() * 0x40
    assert torch.equal(bits(identity(x.to(device))), quiet.to(torch.int16))


@pytest.mark.parametrize("factor", [0.7, -1.0, 3e38, 1e-38, 1.5, float("inf")])
def test_results_are_rounded_to_nearest_even(operators, factor, device):
    """Factors have eight bits, so float32 holds all products exactly, except tiny ones."""
    _, products, _ = operators
    a = every_number()
    b = torch.full_like(a, factor)
    expected = (a.double() * b.double()).float().bfloat16()
    product, negative = products(a.to(device), b.to(device))
    assert same(product, expected)
    assert same(negative, -expected)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_and_place(operators, size, start, device):
    """Nothing is written before the first or behind the last element."""
    _, products, minus_twice_ = operators
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.randn(size + 9, generator=generator).bfloat16() for _ in range(2))
    inside = slice(4 + start, 4 + start + size)
    exact = a.double(), b.double()

    product, negative = products(a.to(device)[inside], b.to(device)[inside])
    expected = (exact[0] * exact[1]).bfloat16()
    assert same(product, expected[inside])
    assert same(negative, -expected[inside])

    expected = a.clone()
    expected[inside] = (exact[0] - 2 * exact[1]).bfloat16()[inside]
    written = a.clone().to(device)
    minus_twice_(written[inside], b.to(device)[inside])
    assert torch.equal(written.cpu(), expected)

    written = a.clone().to(device)
    minus_twice_(written[inside], written[inside])
    expected[inside] = -a[inside]
    assert torch.equal(written.cpu(), expected)


def test_rows_that_begin_at_any_element(operators, device):
    """Rows of an odd length, some far apart, and their columns."""
    _, products, _ = operators
    a = torch.arange(7 * 33).view(7, 33).bfloat16()
    for view in (a, a[:, :-2], a[:, 1:], a[::2, 3:10], a.T, a[:, ::2]):
        product, negative = products(view.to(device), view.to(device))
        expected = (view.double() ** 2).bfloat16()
        assert same(product, expected)
        assert same(negative, -expected)
