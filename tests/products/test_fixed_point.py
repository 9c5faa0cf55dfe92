"""Numbers become digits, and digits are multiplied by integers of 4 bits, by any instructions."""

import math

import pytest
import torch

from foo_ops.kernels.vectors import fixed_point
from foo_ops.kernels.vectors.elements import lanes_of
from foo_ops.kernels.vectors.fixed_point import (
    largest_magnitude,
    scale_of_digits,
    store_digits,
    tile_dot_int4,
)
from foo_ops.kernels.vectors.memory import pointer_to, store
from foo_ops.kernels.vectors.register_tiles import tile_store_sums, tile_zero

LANES = lanes_of("float32")
BYTES = 4 * LANES
GROUP = 2 * BYTES
EXPONENTS = (-60, -3, 0, 1, 40)


def digits_of(compiled, numbers, count):
    """Return the digits (place, half, byte) of a group, its scale, and the sum of its integers."""
    lines, bytes_, wide = pointer_to("float32"), pointer_to("int8"), pointer_to("int32")

    def kernel(digits, line, scales, sums):
        bits = largest_magnitude(lines(line), GROUP, LANES)
        scale, inverse = scale_of_digits(bits, count)
        store(lines(scales), 0, scale)
        total = store_digits(bytes_(digits), lines(line), GROUP, inverse, count, LANES)
        store(wide(sums), 0, total)

    digits = torch.zeros(count, 2, BYTES, dtype=torch.int8)
    scale, total = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    compiled(kernel)(*(it.data_ptr() for it in (digits, numbers, scale, total)))
    return digits, scale.double().item(), total.item()


def integers_of(digits):
    places = 256 ** torch.arange(len(digits) - 1, -1, -1, dtype=torch.float64)
    return (digits.double() * places[:, None, None]).sum(0).flatten()


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("largest", [1.0, 126.9 / 64, 127 / 64, 2 - 2**-23])
def test_numbers_are_digits_times_a_power_of_two(compiled, largest, count, exponent):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(GROUP, generator=generator) * 2 - 1
    numbers[3], numbers[5] = largest, -largest
    numbers = numbers * 2.0**exponent
    digits, scale, total = digits_of(compiled, numbers, count)
    found = integers_of(digits)
    assert math.frexp(scale)[0] == 0.5
    assert bool(((found * scale - numbers.double()).abs() <= scale / 2).all())
    # The scale is the least for which the highest digit of the largest has a place.
    assert 63.5 * 256 ** (count - 1) <= found.abs().max() <= 127.5 * 256 ** (count - 1)
    assert total == found.sum()


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_bfloat16_are_exact_down_to_a_64th_of_the_largest(compiled, sign):
    mantissas = torch.arange(128, 256) / 64.0
    exponents = 2.0 ** -torch.arange(0, 6)
    numbers = sign * (mantissas * exponents[:, None]).flatten()
    for part in numbers.split(GROUP):
        group = torch.zeros(GROUP)
        group[: len(part)], group[-1] = part, numbers.abs().max()
        digits, scale, _ = digits_of(compiled, group, 2)
        assert torch.equal(integers_of(digits) * scale, group.double())


INSTRUCTIONS = ("of the processor", "pairs of products", "one by one")


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("whole", [True, False])
def test_products_are_exact(compiled, monkeypatch, instructions, whole):
    """All digits with all integers, the largest and least together."""
    if instructions != INSTRUCTIONS[0]:
        monkeypatch.setattr(fixed_point, "has_byte_dot", lambda lanes: False)
    if instructions == INSTRUCTIONS[2]:
        monkeypatch.setattr(fixed_point, "has_byte_pairs", lambda lanes: False)
    generator = torch.Generator().manual_seed(0)
    rows, columns, count, some = 2, 3, 3, BYTES if whole else BYTES - 3
    digits = torch.randint(-128, 128, (rows, count, 2, BYTES), generator=generator)
    integers = torch.randint(0, 16, (columns, 2, BYTES), generator=generator)
    digits[0, 0], digits[0, 1:], integers[0] = 127, -128, 15
    digits[1, :, :, :4] = -128
    packed = (integers[:, 0] + 16 * integers[:, 1]).to(torch.uint8)
    factors = torch.tensor([[0.5, 2.0, 4.0], [8.0, 0.25, 1.0]])
    given, found = digits.to(torch.int8), torch.zeros(rows, columns)
    numbers, bytes_, unsigned = pointer_to("float32"), pointer_to("int8"), pointer_to("uint8")

    def kernel(sums, left, right, scales, some):
        total = tile_zero(numbers(sums), 2, 3, LANES)
        if whole:
            total = tile_dot_int4(
                total, bytes_(left), 6 * BYTES, unsigned(right), BYTES, None, numbers(scales), 1,
                3,
            )  # fmt: skip
        else:
            total = tile_dot_int4(
                total, bytes_(left), 6 * BYTES, unsigned(right), BYTES, some, numbers(scales), 1,
                3,
            )  # fmt: skip
        tile_store_sums(total, numbers(sums), 3)

    vectors = torch.full((*factors.shape, LANES), math.nan)
    vectors[..., 0] = factors
    compiled(kernel)(*(it.data_ptr() for it in (found, given, packed, vectors)), some)
    places = 256 ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
    left = (digits.double() * places[:, None, None]).sum(1)[..., :some]
    exact = torch.einsum("rhb,chb->rc", left, integers.double()[..., :some])
    magnitude = torch.einsum("rhb,chb->rc", left.abs(), integers.double()[..., :some])
    # Sums of four are exact; they are rounded to float32, and added up in it.
    error = (found.double() / factors - exact).abs()
    assert bool((error <= 2 * LANES * torch.finfo(torch.float32).eps * magnitude).all())
    if whole:
        assert found[0, 0] == 0.5 * exact[0, 0]


def test_lanes_share_factors(compiled):
    """Of two groups in a vector each has its own."""
    numbers, bytes_, unsigned = pointer_to("float32"), pointer_to("int8"), pointer_to("uint8")

    def kernel(sums, left, right, scales):
        total = tile_zero(numbers(sums), 1, 1, LANES)
        total = tile_dot_int4(
            total, bytes_(left), 0, unsigned(right), 0, None, numbers(scales), 2, 1
        )
        tile_store_sums(total, numbers(sums), 1)

    left, right = torch.ones(2 * BYTES, dtype=torch.int8), torch.zeros(BYTES, dtype=torch.uint8)
    right[: BYTES // 2], right[BYTES // 2 :] = 0x21, 0x43
    found, factors = torch.zeros(1), torch.full((LANES,), math.nan)
    factors[0], factors[1] = 1, 100
    compiled(kernel)(*(it.data_ptr() for it in (found, left, right, factors)))
    assert found.item() == BYTES // 2 * 3 + 100 * (BYTES // 2 * 7)
