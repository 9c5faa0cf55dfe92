"""foo::linear_int4: numbers of all magnitudes, and the precision of its products."""

import pytest
import torch

import foo_ops
from foo_ops.testing import LINEAR_INT4, Sample, check_outputs, reference
from foo_ops.testing.specs.linear import int4_sample

DTYPES = LINEAR_INT4.dtypes
GROUP_SIZES = (32, 64, 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 6, 30])
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_sums_of_numbers_near_the_largest(size, rows, dtype):
    """The sum of a group overflows the dtype, but the row's output fits."""
    sample = int4_sample("huge", (rows,), 3, 20, group_size=size, has_bias=False)(dtype)
    input, weight, scale, zero = sample.inputs
    input[:, 1:4] = 0.4 * torch.finfo(dtype).max
    scale.fill_(2.0**-8)
    # Scaled down far enough for float64 inputs, too.
    small = [it.double() for it in (input.double() / 2**12, scale, zero)]
    weight_of = foo_ops.dequantize_weight(weight, *small[1:])
    expected = small[0] @ weight_of.T
    found = foo_ops.linear_int4(*sample.inputs, group_size=size).double() / 2**12
    magnitudes = small[0].abs() @ weight_of.abs().T
    # With more rows, weights are rounded to bfloat16 if the processor multiplies it.
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    eps = max(torch.finfo(dtype).eps, 64 * torch.finfo(compute).eps)
    assert bool(((found - expected).abs() <= eps * magnitudes).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("groups", [5, 37])
def test_integers_are_multiplied_exactly(groups, size, rows, dtype):
    """With rows of integers, and powers of two as scales, only the result is rounded."""
    sample = int4_sample("exact", (rows,), groups, 37, group_size=size)(dtype)
    input, weight, scale, zero, bias = sample.inputs
    input, zero, bias = ((16 * it).round() for it in (input, zero, bias))
    scale = 2.0 ** (4 * scale).round()
    wide = [it.double() for it in (scale, zero)]
    weight_of = foo_ops.dequantize_weight(weight, *wide)
    expected = (input.double() @ weight_of.T + bias.double()).to(dtype)
    found = foo_ops.linear_int4(input, weight, scale, zero, bias, group_size=size)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_groups_of_all_magnitudes(size, rows, dtype):
    """Tiny and huge groups beside usual ones, also beyond the range of scales, and zeros."""
    mixed = ((0, -70, 3, -90, 1), (0, 70, 3, 80, 1), (0, -63, 63, -65, 65))
    for exponents in (*mixed, (-60, -70), (-100, -110), (-120, -120), (90, 100)):
        make = int4_sample("sizes", (rows,), len(exponents), 9, group_size=size, has_bias=False)
        sample = make(dtype)
        input, *others = sample.inputs
        powers = torch.tensor([2.0**it for it in exponents], dtype=dtype)
        groups = input.unflatten(1, (-1, size)) * powers[:, None]
        groups[:, :, 1::2] = 0
        groups[0, 0] = 0
        scaled = Sample((groups.flatten(1), *others), sample.keywords)
        check_outputs(LINEAR_INT4, scaled, dtype, LINEAR_INT4.call(scaled))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 4])
def test_inputs_are_rounded_to_a_fraction_of_the_largest_of_their_group(rows, dtype):
    """The documented bound, with one number that dwarfs the others of its group."""
    sample = int4_sample("outliers", (rows,), 3, 40, has_bias=False)(dtype)
    input, weight, scale, zero = sample.inputs
    largest = torch.tensor([2.0**12, 1000.0, 1.0], dtype=dtype)
    input[:, ::32] = largest
    # The weights of the large numbers are zero, so that only the others count.
    zero.copy_(zero.round().clamp(0, 15))
    weight[:, ::16] = weight[:, ::16] & 0xF0 | zero.to(torch.uint8)
    found = foo_ops.linear_int4(input, weight, scale, zero, group_size=32)
    wide = [it.double() for it in (scale, zero)]
    weight_of = foo_ops.dequantize_weight(weight, *wide)
    expected = input.double() @ weight_of.T
    steps = 16256 if dtype == torch.bfloat16 else 127 * 2**15
    rounding = (weight_of.abs().unflatten(1, (3, 32)).sum(-1) @ largest.double()) / (2 * steps)
    magnitude_of = reference.numbers_of_int4(weight, wide[0].abs(), -wide[1], 32)
    of_sums = 8 * torch.finfo(torch.float32).eps * (input.double().abs() @ magnitude_of.T)
    error, eps = (found.double() - expected).abs(), torch.finfo(dtype).eps
    assert bool((error <= rounding + eps * expected.abs() + of_sums).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_weights_of_infinite_scales_are_infinite(size, rows, dtype):
    """Also where integer and zero, each times the scale, would have the same sign."""
    weight = torch.full((3, size // 2), 0x55, dtype=torch.uint8)
    scale = torch.tensor([[torch.inf], [torch.inf], [2.0]], dtype=dtype)
    zero = torch.tensor([[3.0], [7.0], [4.0]], dtype=dtype)
    input = torch.full((rows, size), 0.25, dtype=dtype)
    found = foo_ops.linear_int4(input, weight, scale, zero, group_size=size)
    expected = torch.tensor([torch.inf, -torch.inf, 0.5 * size], dtype=dtype).expand(rows, 3)
    assert torch.equal(found, expected)
