"""``%``, ``//`` and ``math.fmod`` in kernels: floats against fractions, integers against Python."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from foo_ops import language, library

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 4.0, -4.0, 1e30, -1e-40]


@library.numba_op("foo_division::remainder")
def remainder(x: float, y: float) -> float:
    return x % y


@library.numba_op("foo_division::floor_divide")
def floor_divide(x: float, y: float) -> float:
    return x // y


@library.numba_op("foo_division::fmod")
def fmod(x: float, y: float) -> float:
    return math.fmod(x, y)


@library.numba_op("foo_division::of_integers")
def of_integers(x: int, y: int) -> tuple[int, int]:
    return x // y, x % y


OPERATORS = {
    "remainder": (remainder, np.mod),
    "floor_divide": (floor_divide, np.floor_divide),
    "fmod": (fmod, np.fmod),
}


def samples(dtype):
    """Return operands with quotients of all sizes, near integers, and near the one-step limit."""
    kind, generator = DTYPES[dtype], np.random.default_rng(0)
    limits = np.finfo(kind)
    count, digits = 300, limits.nmant
    smallest, largest = math.log(limits.smallest_subnormal), math.log(limits.max)
    every = np.exp(generator.uniform(smallest, largest, (2, count)))
    near = generator.uniform(1, 9, count)
    wholes = np.floor(np.exp2(generator.uniform(0, digits + 3, count)))
    parts = [
        (every[0], every[1]),
        (generator.uniform(-99, 99, count), near),
        (near.astype(kind) * wholes, near),
        (np.nextafter((near.astype(kind) * wholes).astype(kind), kind(0)), near),
        (every[0] * generator.uniform(1, 1000, count), every[0]),
    ]
    with np.errstate(over="ignore"):
        x, y = (torch.from_numpy(np.concatenate(part).astype(kind)) for part in zip(*parts))
    is_usable = x.isfinite() & (y > 0) & y.isfinite()
    x, y = x[is_usable], y[is_usable]
    signs = torch.from_numpy(generator.choice([-1, 1], (2, len(x)))).to(dtype)
    return x * signs[0], y * signs[1]


def units(result, exact, dtype):
    limits = torch.finfo(dtype)
    least = Fraction(limits.smallest_normal * limits.eps)
    exponent = math.floor(math.log2(abs(exact))) if exact else -2000
    last = max(Fraction(2) ** exponent * Fraction(limits.eps), least)
    return abs(Fraction(result) - exact) / last


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fmod_has_no_error(dtype):
    x, y = samples(dtype)
    for value, a, b in zip(fmod(x, y).tolist(), x.tolist(), y.tolist()):
        assert value == math.fmod(a, b), (a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_remainders_are_within_half_a_unit(dtype):
    x, y = samples(dtype)
    for value, a, b in zip(remainder(x, y).tolist(), x.tolist(), y.tolist()):
        exact = Fraction(a) % Fraction(b)
        assert units(value, exact, dtype) <= 0.501, (a, b)
        assert math.copysign(1, value) == math.copysign(1, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quotients_are_exact_while_they_are_integers_of_a_float(dtype):
    x, y = samples(dtype)
    largest = torch.finfo(dtype).max
    seen = 0
    for value, a, b in zip(floor_divide(x, y).tolist(), x.tolist(), y.tolist()):
        exact = Fraction(a) // Fraction(b)
        if abs(exact) < 2 / torch.finfo(dtype).eps - 1:
            assert value == exact, (a, b)
        elif abs(exact) < largest:
            assert units(value, exact, dtype) <= 2, (a, b)
            seen += 1
        else:
            assert abs(value) >= largest / 2
    assert seen > 100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_special_values(name, dtype):
    operator, numpys = OPERATORS[name]
    special = torch.tensor(SPECIAL, dtype=dtype)
    x, y = (it.contiguous() for it in torch.broadcast_tensors(special[:, None], special))
    with np.errstate(all="ignore"):
        expected = numpys(x.numpy(), y.numpy())
    result, expected = operator(x, y), torch.from_numpy(expected)
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(result.signbit()[~result.isnan()], expected.signbit()[~expected.isnan()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_huge_quotient_changes_no_neighbour(dtype):
    x = torch.linspace(-99, 99, 83, dtype=dtype)
    huge = x.clone()
    huge[::7] *= 1e30
    y = torch.full_like(x, 3.7)
    for operator in (remainder, floor_divide, fmod):
        result = operator(huge, y)
        alone = torch.cat([operator(*pair) for pair in zip(huge.split(1), y.split(1))])
        assert torch.equal(result, alone)
        assert torch.equal(result[huge == x], operator(x, y)[huge == x])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_computes_in_float32(dtype):
    x, y = torch.linspace(-99, 99, 200).to(dtype), torch.linspace(0.25, 9, 200).to(dtype)
    for operator in (remainder, floor_divide, fmod):
        expected = operator(x.float(), y.float()).to(dtype)
        assert torch.equal(operator(x, y), expected)


def integers(dtype):
    """Return numbers of all sizes and the extremes, with divisors of all sizes and 0."""
    info, generator = torch.iinfo(dtype), torch.Generator().manual_seed(0)
    edges = [info.min, info.min + 1, 0, 1, 2, 3, 7, info.max // 2, info.max - 1, info.max]
    edges += [-1, -2, -7] if info.min < 0 else []
    if dtype == torch.int64:
        edges += [2**53 + 1, 2**62 + 1, -(2**62) - 1, 2**32 - 1, -(2**32) - 1, 2**63 - 513]
    # All sizes; the second half has no number of more than 51 bits.
    shifts = torch.randint(0, info.bits, (1000,), generator=generator)
    shifts[500:] = shifts[500:].clamp(min=max(0, info.bits - 52))
    random = torch.randint(info.min, info.max, (2, 1000), generator=generator) >> shifts
    random = random.to(dtype)
    quotients = (random[0, 500:].double() / random[1, 500:].double()).nan_to_num(0, 0, 0).to(dtype)
    edges = torch.tensor(edges, dtype=dtype)
    x, y = (it.flatten() for it in torch.broadcast_tensors(edges[:, None], edges))
    # At a multiple of the divisor, and one below.
    multiples = random[1, 500:] * quotients
    parts = ((x, y), random, (multiples, random[1, 500:]), (multiples - 1, random[1, 500:]))
    return tuple(torch.cat(part) for part in zip(*parts))


def wrapped(number, dtype):
    bits, low = torch.iinfo(dtype).bits, torch.iinfo(dtype).min
    return (number - low) % 2**bits + low


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype):
    x, y = integers(dtype)
    quotients, remainders = (it.tolist() for it in of_integers(x, y))
    for quotient, rest, a, b in zip(quotients, remainders, x.tolist(), y.tolist()):
        expected = divmod(a, b) if b else (0, 0)
        assert (quotient, rest) == (wrapped(expected[0], dtype), expected[1]), (a, b)
    alone = [of_integers(*pair) for pair in zip(x[:400].split(1), y[:400].split(1))]
    assert [(int(a), int(b)) for a, b in alone] == list(zip(quotients, remainders))[:400]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("divisor", [7, 8, 1, -1, -6])
def test_integers_by_a_constant(divisor, dtype):
    name = f"foo_division::by_{divisor}_{str(dtype)[6:]}".replace("-", "minus_")

    @library.numba_op(name)
    def by_constant(x: int) -> tuple[int, int]:
        return x // divisor, x % divisor

    x, _ = integers(dtype)
    quotients, remainders = by_constant(x)
    for quotient, rest, a in zip(quotients.tolist(), remainders.tolist(), x.tolist()):
        exact = divmod(a, divisor)
        assert (quotient, rest) == tuple(wrapped(it, dtype) for it in exact), a


def test_a_quotient_of_int32_has_room_for_all():
    @library.numba_op("foo_division::as_floats")
    def as_floats(x: int, y: int) -> float:
        return float(x // y)

    x = torch.full((40,), -(2**31), dtype=torch.int32)
    assert as_floats(x, torch.full_like(x, -1)).tolist() == [2.0**31] * 40


def test_unsigned_integers_of_64_bits():
    @library.numba_op("foo_division::unsigned")
    def unsigned(x: int, y: int) -> tuple[int, int]:
        return x // y, x % y

    numbers = [2**64 - 1, 2**63, 2**63 + 5, 7, 1]
    x = torch.tensor(numbers * 4, dtype=torch.uint64)
    y = torch.tensor([2**63 + 1] * 5 + [3] * 5 + [2**64 - 1] * 5 + [0] * 5, dtype=torch.uint64)
    for quotient, rest, a, b in zip(*(it.tolist() for it in (*unsigned(x, y), x, y))):
        assert (quotient, rest) == (divmod(a, b) if b else (0, 0))


def test_explicit_vectors_take_them_too():
    library.define("foo_division::vectors", "(Tensor input, Tensor divisor) -> Tensor")
    library.register_fake("foo_division::vectors", lambda input, divisor: torch.empty_like(input))

    @library.register_kernel("foo_division::vectors", "cpu")
    @library.tile_kernel(contiguous_rows=True)
    def vectors(input, divisor, output, rows):
        step = language.lanes(input)
        for row in rows:
            x, y, z = input.row(row), divisor.row(row), output.row(row)
            for start in range(0, input.shape[-1], step):
                a = language.load_vector(x, start, step)
                b = language.load_vector(y, start, step)
                rest = language.fmod(a, b) + language.remainder(a, b)
                language.store(z, start, rest + language.floor_divide(a, b))

    for dtype in DTYPES:
        x = torch.linspace(-60, 60, 64, dtype=dtype)
        x[5] = 1e20
        y = torch.linspace(0.5, 9, 64, dtype=dtype)
        expected = torch.fmod(x, y) + torch.remainder(x, y) + torch.floor_divide(x, y)
        torch.testing.assert_close(torch.ops.foo_division.vectors(x, y), expected)
