"""Products of matrices in bfloat16 limbs, on the matrix unit if there is one."""

import itertools

import numpy as np
import pytest
import torch

from foo_ops.kernels.products.on_amx import GROUP, STEPS_AT_ONCE, make_amx_products
from foo_ops.kernels.simd.memory import pointer_to

PRODUCTS = {1: 1, 2: 4, 3: 6}
"""Number of limb products for a product of two numbers, by the number of limbs."""
ROUNDING, DROPPED = 2.0**-24, 2.0**-22
"""Relative errors of float32 rounding, and of dropping the smallest products of three limbs."""
# Fills memory that must not be written.
GUARD = -12345.5


@pytest.fixture(scope="module", params=PRODUCTS)
def multiply(compiled, request):
    """Provide a number of limbs, and the kernel that multiplies with that many."""
    matmul, begin, end = make_amx_products(request.param)
    floats, pairs = pointer_to("float32"), pointer_to("bfloat16x2")

    def kernel(
        c, c_stride, a, a_row, a_group, a_limb, b, b_stride, b_limb, rows, columns, steps,
        accumulate, are_small,
    ):  # fmt: skip
        begin()
        matmul(
            floats(c), c_stride, (pairs(a), a_row, a_group, a_limb), (pairs(b), b_stride, b_limb),
            rows, columns, steps, accumulate != 0, are_small != 0,
        )  # fmt: skip
        end()

    return request.param, compiled(kernel)


def surrounded(pairs):
    """Copy into a tensor with wider rows and one more row, filled with NaN to spoil all sums."""
    *matrices, rows, columns, _ = pairs.shape
    room = torch.full((*matrices, rows + 1, columns + 3, 2), torch.nan, dtype=torch.bfloat16)
    room[..., :rows, :columns, :] = pairs
    return room


def product(kernel, a, b, before=None, are_small=True):
    """Multiply a and b, given as limbs (limb, row, column); add ``before`` if it is given."""
    rows, columns, steps = a.shape[1], b.shape[2], b.shape[1] // 2
    a = surrounded(a.unflatten(2, (steps // GROUP, GROUP, 2)).transpose(1, 2))
    b = surrounded(b.unflatten(1, (steps, 2)).transpose(2, 3))
    room = torch.full((rows + 2, columns + 6), GUARD)
    c = room[1:-1, 3:-3]
    c.copy_(torch.full_like(c, torch.nan) if before is None else before)
    kernel(
        *(c.data_ptr(), c.stride(0)),
        *(a.data_ptr(), a.stride(2) // 2, a.stride(1) // 2, a.stride(0) // 2),
        *(b.data_ptr(), b.stride(1) // 2, b.stride(0) // 2),
        *(rows, columns, steps, before is not None, are_small),
    )
    result = c.numpy().copy()
    c.fill_(GUARD)
    assert (room == GUARD).all(), "something was written outside of c"
    return result


def split(numbers, limbs):
    """Split float32 numbers into limbs, each the bfloat16 nearest to the remainder."""
    result = []
    for _ in range(limbs):
        limb = numbers.bfloat16()
        result.append(limb)
        # The remainder of an infinity is zero.
        numbers = (numbers - limb.float()).nan_to_num(nan=0.0)
    return torch.stack(result)


def random_numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(result, a, b, before=0.0, terms=None):
    """Compare with the float64 product of the sums of the limbs.

    A float32 sum of n terms is off by at most n roundings of the terms' total size. ``terms`` is
    the
    number of nonzero products in a sum.
    """
    dropped = DROPPED if len(a) == 3 else 0.0
    roundings = (PRODUCTS[len(a)] * (terms or b.shape[1]) + 1) * ROUNDING
    a, b = a.double().numpy(), b.double().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        expected = a.sum(0) @ b.sum(0) + before
        sizes = abs(a).sum(0) @ abs(b).sum(0)
        limit = roundings / (1 - roundings) * (sizes + abs(before)) + dropped * sizes
        rounded = expected.astype(np.float32)
        finite = np.isfinite(rounded)
        assert (abs(result - expected) <= limit)[finite].all()
    np.testing.assert_array_equal(result[~finite], rounded[~finite])


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 48, 64])
@pytest.mark.parametrize("columns", [16, 32, 48, 96])
def test_shapes(multiply, rows, columns):
    limbs, kernel = multiply
    lengths = (16, 32, STEPS_AT_ONCE + 16, 2 * STEPS_AT_ONCE)
    for steps, accumulates, are_small in itertools.product(lengths, (False, True), (False, True)):
        a = split(random_numbers(0, rows, 2 * steps), limbs)
        b = split(random_numbers(1, 2 * steps, columns), limbs)
        before = random_numbers(2, rows, columns) if accumulates else None
        result = product(kernel, a, b, before, are_small)
        check(result, a, b, before.numpy() if accumulates else 0.0)


@pytest.mark.parametrize("are_small", [False, True])
def test_products_of_two_numbers(multiply, are_small):
    """A diagonal matrix has no sums, whose roundings would hide the smallest products."""
    limbs, kernel = multiply
    a = split(random_numbers(0, 64).diag(), limbs)
    b = split(random_numbers(1, 64, 96), limbs)
    check(product(kernel, a, b, are_small=are_small), a, b, terms=1)


def test_products_of_two_parts(multiply):
    """Each pair of limbs that counts is multiplied alone, with sums that are exact in float32."""
    limbs, kernel = multiply
    integers = (3 * random_numbers(0, 49, 64)).round(), (3 * random_numbers(1, 64, 48)).round()
    pairs = [pair for pair in itertools.product(range(limbs), repeat=2) if sum(pair) <= 2]
    assert len(pairs) == PRODUCTS[limbs]
    for pair in pairs:
        a, b = (torch.zeros(limbs, *factor.shape).bfloat16() for factor in integers)
        for factor, limb, numbers in zip((a, b), pair, integers, strict=True):
            factor[limb] = numbers * 2.0 ** (-8 * limb)
        expected = integers[0].double().numpy() @ integers[1].double().numpy()
        expected *= 2.0 ** (-8 * sum(pair))
        np.testing.assert_array_equal(product(kernel, a, b), expected, f"limbs {pair}")


@pytest.mark.parametrize("accumulates", [False, True])
def test_numbers_that_are_not_small(multiply, accumulates):
    """A zero limb does not corrupt infinities, NaN, or products that overflow."""
    limbs, kernel = multiply
    # Nowhere zero: zero times infinity is NaN in float64, too.
    a, b = random_numbers(0, 33, 64).sign() / 2, random_numbers(1, 64, 48).sign() / 4
    a[0, 4], a[1, 5], a[2, 6], a[3, 1] = torch.inf, -torch.inf, torch.nan, 1e38
    b[8, 2], b[9, 3], b[11, 4], b[14, 6], b[1, 8] = -torch.inf, torch.inf, torch.nan, -1e38, 8.0
    a, b = split(a, limbs), split(b, limbs)
    before = random_numbers(2, 33, 48) if accumulates else None
    result = product(kernel, a, b, before, are_small=False)
    assert result[3, 8] == np.inf
    assert np.isfinite(result[4:, [0, 6, 8]]).all()
    check(result, a, b, before.numpy() if accumulates else 0.0)
