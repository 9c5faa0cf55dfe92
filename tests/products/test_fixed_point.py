"""Numbers become digits, which are multiplied by weights of 4 bits, with any instructions."""

import math

import pytest
import torch

from foo_ops.kernels.simd import fixed_point, narrow
from foo_ops.kernels.simd.fixed_point import (
    FLOAT4,
    INT4,
    half_power,
    largest_magnitude,
    load_half_powers,
    scale_of_integers,
    store_digits,
    tile_dot_codes,
)
from foo_ops.kernels.simd.memory import load, pointer_to, store
from foo_ops.kernels.simd.register_tiles import tile_store_sums, tile_zero
from foo_ops.kernels.simd.types import lanes_of

LANES = lanes_of("float32")
BYTES = 4 * LANES
GROUP = 2 * BYTES
EXPONENTS = (-60, -3, 0, 1, 40)
INSTRUCTIONS = ("of the processor", "pairs of products", "one by one")


@pytest.fixture(params=INSTRUCTIONS)
def size(request, monkeypatch):
    """Provide a digit's bytes, with this processor's instructions and with those of others."""
    if request.param != INSTRUCTIONS[0]:
        for module in (narrow, fixed_point):
            monkeypatch.setattr(module, "has_byte_dot", lambda lanes: False)
        monkeypatch.setattr(fixed_point, "has_byte_shuffle", lambda size: False)
    if request.param == INSTRUCTIONS[2]:
        monkeypatch.setattr(narrow, "has_integer_dot", lambda lanes: False)
    return 1 if fixed_point.has_byte_dot(LANES) else 2


def split(integers, bits, size):
    """Return the digits (place, byte) of a group's numbers, in the order of memory.

    Digits of one byte have the group's first half before its second half. Otherwise the even
    numbers
    of the first half come first, then those of the second half, and then the odd numbers.
    """
    base, rest, places = 256**size, integers.clone(), []
    for _ in range(-(-bits // (8 * size))):
        digit = (rest + base // 2) % base - base // 2
        rest = (rest - digit) // base
        parts = [half[offset::size] for offset in range(size) for half in digit.chunk(2)]
        dtype = torch.int8 if size == 1 else torch.int16
        places.insert(0, torch.cat(parts).to(dtype).view(torch.int8))
    assert not rest.any()
    return torch.stack(places)


def stored(compiled, numbers, bits, size, codes=INT4):
    """Return the digits (place, byte) of a group, its scale, and the sum of its integers."""
    lines, bytes_, wide = pointer_to("float32"), pointer_to("int8"), pointer_to("int32")

    def kernel(digits, line, scales, sums):
        magnitude = largest_magnitude(lines(line), GROUP, LANES)
        scale, inverse = scale_of_integers(magnitude, bits)
        store(lines(scales), 0, scale)
        total = store_digits(bytes_(digits), lines(line), GROUP, inverse, bits, LANES, codes)
        store(wide(sums), 0, total)

    digits = torch.zeros(-(-bits // (8 * size)), GROUP * size, dtype=torch.int8)
    scale, total = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    compiled(kernel)(*(it.data_ptr() for it in (digits, numbers, scale, total)))
    return digits, scale.double().item(), total.item()


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("bits", [16, 24])
@pytest.mark.parametrize("largest", [1.0, 126.9 / 64, 127 / 64, 2 - 2**-23])
def test_numbers_are_digits_times_a_power_of_two(compiled, size, largest, bits, exponent):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(GROUP, generator=generator) * 2 - 1
    numbers[3], numbers[5] = largest, -largest
    numbers = numbers * 2.0**exponent
    digits, scale, total = stored(compiled, numbers, bits, size)
    assert math.frexp(scale)[0] == 0.5
    integers = (numbers.double() / scale).round()
    # The scale is the smallest that keeps the highest 8 bits of the largest number.
    assert 63.5 * 2 ** (bits - 8) <= integers.abs().max() <= 127.5 * 2 ** (bits - 8)
    assert torch.equal(digits, split(integers.long(), bits, size))
    assert total == integers.sum()


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_bfloat16_are_exact_down_to_a_64th_of_the_largest(compiled, size, sign):
    mantissas = torch.arange(128, 256) / 64.0
    exponents = 2.0 ** -torch.arange(0, 6)
    numbers = sign * (mantissas * exponents[:, None]).flatten()
    for part in numbers.split(GROUP):
        group = torch.zeros(GROUP)
        group[: len(part)], group[-1] = part, numbers.abs().max()
        digits, scale, _ = stored(compiled, group, 16, size)
        integers = group.double() / scale
        assert torch.equal(integers, integers.round())
        assert torch.equal(digits, split(integers.long(), 16, size))


# By code.
DOUBLED_FLOAT4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


@pytest.mark.parametrize(("codes", "whole"), [(INT4, True), (INT4, False), (FLOAT4, True)])
def test_products_are_exact(compiled, size, whole, codes):
    """With the largest and smallest numbers, and all others, times all integers or codes."""
    generator = torch.Generator().manual_seed(0)
    rows, columns, some = 2, 3, BYTES if whole else BYTES - 3
    most = 127 * 2**16
    numbers = torch.randint(-most, most + 1, (rows, GROUP), generator=generator)
    numbers[0], numbers[1, :4], numbers[1, BYTES : BYTES + 4] = most, -most, -most
    integers = torch.randint(0, 16, (columns, 2, BYTES), generator=generator)
    integers[0] = 15
    packed = (integers[:, 0] + 16 * integers[:, 1]).to(torch.uint8)
    if codes == FLOAT4:
        integers = 12 + DOUBLED_FLOAT4[integers]
    factors = torch.tensor([[0.5, 2.0, 4.0], [8.0, 0.25, 1.0]])
    vectors = torch.full((*factors.shape, LANES), math.nan)
    vectors[..., 0] = factors
    given = torch.stack([split(row, 24, size) for row in numbers])
    found, stride = torch.zeros(rows, columns), given[0].numel()
    lines, bytes_, unsigned = pointer_to("float32"), pointer_to("int8"), pointer_to("uint8")

    def kernel(sums, left, right, scales, some):
        total = tile_zero(lines(sums), 2, 3, LANES)
        if whole:
            total = tile_dot_codes(
                total,
                bytes_(left),
                stride,
                unsigned(right),
                BYTES,
                None,
                lines(scales),
                1,
                24,
                codes,
            )
        else:
            total = tile_dot_codes(
                total,
                bytes_(left),
                stride,
                unsigned(right),
                BYTES,
                some,
                lines(scales),
                1,
                24,
                codes,
            )
        tile_store_sums(total, lines(sums), 3)

    compiled(kernel)(*(it.data_ptr() for it in (found, given, packed, vectors)), some)
    left, right = (
        it.double().unflatten(-1, (2, BYTES))[..., :some] for it in (numbers, integers.flatten(1))
    )
    exact = torch.einsum("rhb,chb->rc", left, right)
    magnitude = torch.einsum("rhb,chb->rc", left.abs(), right)
    # Sums of eight are exact; they are rounded to float32 and added there.
    error = (found.double() / factors - exact).abs()
    assert bool((error <= 2 * LANES * torch.finfo(torch.float32).eps * magnitude).all())
    if whole:
        assert found[0, 0] == 0.5 * exact[0, 0]


def test_lanes_share_factors(compiled, size):
    """Two groups in a vector have a factor each."""
    numbers, bytes_, unsigned = pointer_to("float32"), pointer_to("int8"), pointer_to("uint8")

    def kernel(sums, left, right, scales):
        total = tile_zero(numbers(sums), 1, 1, LANES)
        total = tile_dot_codes(
            total, bytes_(left), 0, unsigned(right), 0, None, numbers(scales), 2, 16, INT4
        )
        tile_store_sums(total, numbers(sums), 1)

    left = split(torch.ones(GROUP, dtype=torch.int64), 16, size)
    right = torch.zeros(BYTES, dtype=torch.uint8)
    right[: BYTES // 2], right[BYTES // 2 :] = 0x21, 0x43
    found, factors = torch.zeros(1), torch.full((LANES,), math.nan)
    factors[0], factors[1] = 1, 100
    compiled(kernel)(*(it.data_ptr() for it in (found, left, right, factors)))
    assert found.item() == BYTES // 2 * 3 + 100 * (BYTES // 2 * 7)


@pytest.mark.parametrize("bits", [16, 24])
def test_digits_of_pairs(compiled, size, bits):
    """Even numbers of a group are stored as its first half: weights in a byte are adjacent."""
    numbers = torch.randn(GROUP, generator=torch.Generator().manual_seed(0))
    ordered = torch.cat((numbers[::2], numbers[1::2]))
    found, expected = (
        stored(compiled, numbers, bits, size, FLOAT4),
        stored(compiled, ordered, bits, size),
    )
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_exponents(compiled):
    """All of E8M0, also the two whose halves are subnormal, and NaN."""
    exponents = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    vectors, scalars = torch.zeros(256 + LANES), torch.zeros(256)
    numbers, unsigned = pointer_to("float32"), pointer_to("uint8")

    def kernel(vectors, scalars, exponents):
        for index in range(0, 256, LANES):
            part = load_half_powers(unsigned(exponents), index, LANES, LANES)
            store(numbers(vectors), index, part)
        store(numbers(vectors), 256, load_half_powers(unsigned(exponents), 3, 1, LANES))
        for index in range(256):
            store(numbers(scalars), index, half_power(load(unsigned(exponents), index)))

    compiled(kernel)(*(it.data_ptr() for it in (vectors, scalars, exponents)))
    expected = torch.tensor([*(2.0 ** (it - 128) for it in range(255)), math.nan])
    assert torch.equal(vectors[:255], expected[:255])
    assert torch.equal(scalars[:255], expected[:255])
    assert vectors[255].isnan()
    assert scalars[255].isnan()
    # Behind the counted ones, exponents are not read: 0 stands for them.
    assert vectors[256:].tolist() == [2.0**-125, *[2.0**-128] * (LANES - 1)]
