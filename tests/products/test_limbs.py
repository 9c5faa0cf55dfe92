"""The bfloat16 limbs of a number add up to it, and the check for small numbers is right."""

import itertools
import math

import pytest
import torch

from foo_ops.kernels.products.limbs import (
    GROUP_ELEMENTS,
    make_pair_storer,
    make_row_splitter,
    make_smallness_check,
)
from foo_ops.kernels.simd.memory import load_vector, pointer_to, store
from foo_ops.kernels.simd.types import lanes_of

LANES = lanes_of("float32")
LIMBS = {"bfloat16": 1, "float16": 2, "float32": 3}
LARGEST = torch.finfo(torch.bfloat16).max
NOT_SMALL, LARGEST_SMALL = 2.0**30, 2.0**30 - 64  # neighbours in float32
# Fills memory that must not be written.
GUARD = 96.0
# Elements between the end of a limb and the next one.
GAP = 5


def float32_after(number, towards):
    return torch.tensor(number).nextafter(torch.tensor(towards)).item()


def all_of(dtype):
    return torch.arange(-(2**15), 2**15).short().view(dtype).float()


def some_of_float32():
    """Return numbers of all magnitudes with a last bit in bfloat16's range, and edge cases."""
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0))
    random = bits.int().view(torch.float32)
    random = random[random.isfinite() & (random.abs() >= 2.0**-110)]
    upwards = float32_after(LARGEST, math.inf)
    edges = [
        *(0.0, 2.0**-110, 1.0, 1 + 2.0**-8, 1 + 2.0**-7 + 2.0**-8, 2 - 2.0**-23, 2.0**30),
        *(float32_after(LARGEST, 0.0), LARGEST, upwards, 3.3895e38, LARGEST + 2.0**119),
        *(torch.finfo(torch.float32).max, math.inf, math.nan),
    ]
    # NaNs that become other numbers if their upper or lower halves are rounded or truncated.
    other_nans = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    edges = torch.cat([torch.tensor(edges), other_nans])
    return torch.cat([edges, -edges, random])[: 2**15]


def numbers_of(name):
    return some_of_float32() if name == "float32" else all_of(getattr(torch, name))


def filled(numbers):
    """Pad the numbers to a multiple of two vectors, as the kernels require."""
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % GROUP_ELEMENTS), value=1.0)


@pytest.fixture(scope="module", params=LIMBS)
def numbers(request):
    """Provide a dtype's name, and numbers of this dtype in float32."""
    return request.param, filled(numbers_of(request.param))


def finite_of(numbers):
    """Remove the numbers that bfloat16 rounds to infinity."""
    return filled(numbers[numbers.abs() <= LARGEST])


def limbs_as_pairs(compiled, limbs, a, b):
    """Return the stored limbs of a and b, as (limb, a or b, number)."""
    store_pairs = make_pair_storer(limbs)
    floats, pairs = pointer_to("float32"), pointer_to("bfloat16x2")

    def store_all(target, limb, a, b, count):
        for index in range(0, count, LANES):
            first = load_vector(floats(a), index, LANES)
            second = load_vector(floats(b), index, LANES)
            store_pairs(pairs(target), index, limb, first, second)

    count = len(a)
    target = torch.full((limbs, count + GAP, 2), GUARD, dtype=torch.bfloat16)
    compiled(store_all)(target.data_ptr(), count + GAP, a.data_ptr(), b.data_ptr(), count)
    assert (target[:, count:] == GUARD).all()
    return target[:, :count].transpose(1, 2)


def limbs_as_row(compiled, limbs, numbers):
    """Return the stored limbs, as (limb, number), and whether the numbers are small."""
    split_row = make_row_splitter(limbs, LANES)
    floats, halves, answers = pointer_to("float32"), pointer_to("bfloat16"), pointer_to("int32")

    def split(target, group, limb, source, count, answer):
        small = split_row(halves(target), group, limb, floats(source), count)
        store(answers(answer), 0, 1 if small else 0)

    groups = -(-len(numbers) // GROUP_ELEMENTS)
    width = GROUP_ELEMENTS + GAP
    target = torch.full((limbs, groups + 1, width), GUARD, dtype=torch.bfloat16)
    answer = torch.full((1,), -1, dtype=torch.int32)
    sizes = width, (groups + 1) * width
    compiled(split)(target.data_ptr(), *sizes, numbers.data_ptr(), len(numbers), answer.data_ptr())
    assert (target[:, groups] == GUARD).all()
    assert (target[..., GROUP_ELEMENTS:] == GUARD).all()
    return target[:, :groups, :GROUP_ELEMENTS].flatten(1), answer.item()


def check_limbs(stored, numbers):
    """Check that limbs sum to the numbers, each below the last bit of the one before."""
    torch.testing.assert_close(
        stored.double().sum(0), numbers.double(), rtol=0, atol=0, equal_nan=True
    )
    assert (stored[1:, numbers.isinf()] == 0).all()
    rounded = numbers.abs() <= LARGEST
    for place, limb in enumerate(stored[1:, rounded], start=1):
        assert (limb.float().abs() <= 2.0 ** (-8 * place) * numbers[rounded].abs()).all()
    assert torch.equal(stored[0].signbit()[rounded], numbers.signbit()[rounded])


def test_pairs(compiled, numbers):
    dtype, a = numbers
    a = finite_of(a)
    b = a.flip(0)
    stored = limbs_as_pairs(compiled, LIMBS[dtype], a, b)
    check_limbs(stored[:, 0], a)
    check_limbs(stored[:, 1], b)


def test_rows(compiled, numbers):
    dtype, source = numbers
    stored, small = limbs_as_row(compiled, LIMBS[dtype], source)
    check_limbs(stored, source)
    assert small == 0


def test_rows_of_small_numbers(compiled, numbers):
    dtype, source = numbers
    source = filled(source[source.abs() < NOT_SMALL])
    stored, small = limbs_as_row(compiled, LIMBS[dtype], source)
    check_limbs(stored, source)
    assert small == 1


def test_numbers_of_which_bits_are_below_all_of_bfloat16(compiled):
    """The last limb is rounded to a multiple of the smallest bfloat16, 2**-133."""
    bits = torch.randint(0, 17 << 23, (128 * LANES,), generator=torch.Generator().manual_seed(0))
    source = bits.int().view(torch.float32)
    source[::2].neg_()
    stored, small = limbs_as_row(compiled, 3, source)
    assert (stored.double().sum(0) - source.double()).abs().max() <= 2.0**-134
    assert small == 1


def test_smallness(compiled):
    are_small = make_smallness_check(LANES)
    floats, answers = pointer_to("float32"), pointer_to("int32")

    def check(source, count, answer):
        store(answers(answer), 0, 1 if are_small(floats(source), count) else 0)

    count, kernel = 3 * LANES, compiled(check)
    small = torch.full((count + 1,), LARGEST_SMALL)
    small[::2].neg_()
    # The check reads only the first ``count`` numbers.
    small[count] = math.nan
    answer = torch.full((1,), -1, dtype=torch.int32)
    kernel(small.data_ptr(), count, answer.data_ptr())
    assert answer.item() == 1
    others = (NOT_SMALL, -NOT_SMALL, LARGEST, math.inf, -math.inf, math.nan)
    for place, value in itertools.product(range(count), others):
        source = small.clone()
        source[place] = value
        kernel(source.data_ptr(), count, answer.data_ptr())
        assert answer.item() == 0, (place, value)
