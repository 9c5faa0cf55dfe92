"""Indices of tile kernels mean elements, or do not compile."""

import itertools
import math
import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from foo_ops import language, library
from foo_ops.kernels.interpret.views import View
from foo_ops.kernels.lang import views

pytestmark = pytest.mark.usefixtures("one_thread")

serial = itertools.count()


def define(function, schema="(Tensor input) -> Tensor", **options):
    """Define a new operator with a tile kernel."""
    name = f"f{next(serial)}"
    library.define(f"foo_index::{name}", schema)
    library.register_fake(
        f"foo_index::{name}", lambda input, *args: torch.zeros_like(input).contiguous()
    )
    library.register_kernel(
        f"foo_index::{name}", ("cpu", "foo"), library.tile_kernel(function, **options)
    )
    return getattr(torch.ops.foo_index, name)


def refusal(function, input, reason, offset, **options):
    """Return the message for an operator that cannot be compiled for a tensor."""
    call = define(function, **options)
    code = function.__code__
    place = re.escape(f"({code.co_filename}:{code.co_firstlineno + offset}: ")
    with pytest.raises(TypeError, match=rf": wrong index: {re.escape(reason)} {place}") as caught:
        call(input)
    assert type(caught.value) is TypeError
    return str(caught.value)


def one_index(input, output, rows):
    for row in rows:
        output[row] = 2 * input[row]


def three_indices(input, output, rows):
    for row in rows:
        output.flat[row] = input[row, 0, 0]


def two_indices_of_a_row(input, output, rows):
    for row in rows:
        output.row(row)[0, 0] = 1.0


@pytest.mark.parametrize("contiguous_rows", [False, True])
def test_number_of_indices(contiguous_rows, device):
    options = {"contiguous_rows": contiguous_rows}
    call = define(one_index, tiles=lambda input: input.shape[0], **options)
    assert call(torch.arange(6.0, device=device)[::2]).tolist() == [0, 4, 8]
    hint = "({0}.row(i) is a row, {0}.flat[i] the i-th element)"
    wrong = "input has {} and must be given one index for each, got {} " + hint.format("input")
    message = refusal(
        one_index, torch.ones(2, 3, device=device), wrong.format("2 dimensions", 1), 2, **options
    )
    signature = "float32-2d,float32-2d"
    assert re.match(
        rf"foo_index::f\d+: its kernel cannot be compiled for {signature}: wrong", message
    )
    for shape, dimensions in (
        ((), "0 dimensions"),
        ((4,), "1 dimension"),
        ((4, 1), "2 dimensions"),
    ):
        input = torch.ones(shape, device=device)
        refusal(three_indices, input, wrong.format(dimensions, 3), 2, **options)
    wrong = "a row or x.flat must be given one index, got 2"
    refusal(two_indices_of_a_row, torch.ones(2, 3, device=device), wrong, 2, **options)


def from_the_end(input, output, rows):
    for row in rows:
        output[row, 0] = 0.0
        output[row, -1] = input[row, -2] + 10 * input[-1, 0]
        output.row(row)[-2] = input.row(row)[-1]
        output.row(-1)[0] = 7.0
    output.flat[-6] = output.shape[-2] + 100 * input.shape[-1]


@pytest.mark.parametrize("contiguous_rows", [False, True])
def test_negative_constants_count_from_the_end(contiguous_rows, device):
    call = define(from_the_end, tiles=lambda input: input.rows, contiguous_rows=contiguous_rows)
    input = torch.arange(9.0).view(3, 3)
    for matrix in (input, input.T):
        expected = torch.zeros(3, 3)
        expected[:, 2] = matrix[:, 1] + 10 * matrix[2, 0]
        expected[:, 1] = matrix[:, 2]
        expected[2, 0] = 7.0
        expected.view(-1)[-6] = 303.0
        assert torch.equal(call(matrix.to(device)).cpu(), expected)


def through_flat(input, scale, output, rows):
    for row in rows:
        for i in range(input.shape[-1]):
            output.row(row)[i] = input.row(row)[i] * scale.flat[row]


@pytest.mark.parametrize("contiguous_rows", [False, True])
def test_flat_follows_the_strides(contiguous_rows, device):
    call = define(
        through_flat, "(Tensor input, Tensor scale) -> Tensor", contiguous_rows=contiguous_rows
    )
    input, scales = torch.randn(2, 3, 5), torch.randn(4, 6)
    for scale in (scales[::2, ::2], scales[:3, :2].T, scales[:2, :3], scales[:1, :3].expand(2, 3)):
        result = call(input.to(device), scale.to(device))
        assert torch.equal(result.cpu(), input * scale[..., None])


def through_data(input, output, rows):
    for row in rows:
        output.data[row] = input.data[row]


def test_memory_is_indexed_only_where_that_means_elements(device):
    reason = (
        "x.data cannot be indexed, since that would ignore strides: write x[i, j] or x.flat[i] for "
        "an element, or language.load(x.data, offset) to read memory"
    )
    options = {"tiles": lambda input: input.size}
    refusal(through_data, torch.ones(3, device=device), reason, 2, **options)
    options["contiguous_rows"] = True
    refusal(through_data, torch.ones(2, 3, device=device), reason, 2, **options)
    call = define(through_data, **options)
    assert call(torch.arange(6.0, device=device)[::2]).tolist() == [0, 2, 4]


def rounded_down(input, output, rows):
    for row in rows:
        output[row] = input[math.floor(input[row])]


def rounded_to_integers(input, output, rows):
    for row in rows:
        output[row] = input[int(input[row] // 1)]


def test_an_index_is_no_float(device):
    """math.floor returns a float."""
    x = torch.tensor([1.5, 0.0, 2.5], device=device)
    options = {"tiles": lambda input: input.size}
    reason = "an index must be an integer, got float32; int(...) converts a float"
    refusal(rounded_down, x, reason, 2, **options)
    assert define(rounded_to_integers, **options)(x).tolist() == [0, 1.5, 2.5]
    type_ = views.View("float32", 1, False, False, "x")
    interpreted = View(type_, x.data_ptr(), [3], [1])
    with pytest.raises(TypeError, match=re.escape(reason)):
        interpreted[np.float32(1)]


def transposed(input, output, rows):
    """Transpose with explicit offsets."""
    for row in rows:
        for i in range(input.shape[1]):
            value = language.load(input.data, row * input.strides[0] + i * input.strides[1])
            language.store(output.data, row * output.strides[0] + i, value)


def test_memory_is_read_at_offsets(device):
    input = torch.randn(3, 4)
    for matrix in (input, input.T):
        assert torch.equal(define(transposed)(matrix.to(device)).cpu(), matrix)


def differences(input, output, rows):
    for row in rows:
        x, y = input.row(row), output.row(row)
        following = language.shift(x, 1)
        language.prefetch(following, 64)
        for i in range(input.shape[-1] - 1):
            if language.address_of(following) > language.address_of(x):
                y[i] = following[i] - following[i - 1]
        y[-1] = language.shift(following, -1)[-1] + 10 * language.shift(x, -1)[1]


@pytest.mark.parametrize("contiguous_rows", [False, True])
def test_shifted_rows_follow_the_strides(contiguous_rows, device):
    call = define(differences, contiguous_rows=contiguous_rows)
    input = torch.randn(3, 4)
    for matrix in (input, input.T):
        expected = matrix.diff(dim=1)
        last = matrix[:, -1:] + 10 * matrix[:, :1]
        with library.check_bounds():
            result = call(matrix.to(device)).cpu()
        assert torch.equal(result, torch.cat([expected, last], dim=1))


def for_any_number_of_dimensions(input, output, tiles):
    for _ in tiles:
        if input.ndim == 0:
            output.flat[0] = 1.0 + input.shape[-1]
        elif input.ndim == 1:
            output[-1] = input.shape[0] + 10.0
        else:
            output[0, -1] = input.shape[1] + 20.0


def test_branches_for_another_number_of_dimensions_are_not_compiled(device):
    call = define(for_any_number_of_dimensions, tiles=lambda: 1)
    assert call(torch.zeros((), device=device)).tolist() == 2
    assert call(torch.zeros(2, device=device))[-1] == 12
    assert call(torch.zeros(1, 3, device=device))[0, -1] == 23
    wrong = "input has 3 dimensions and must be given one index for each, got 2"
    refusal_of_three = wrong.replace("input", "output")
    with pytest.raises(TypeError, match=refusal_of_three):
        call(torch.zeros(1, 2, 3, device=device))


def third_size(input, output, rows):
    for row in rows:
        output.flat[row] = input.shape[2] + input.strides[-3]


def test_dimensions_that_a_tensor_does_not_have(device):
    call = define(third_size)
    assert call(torch.zeros(1, 1, 5, device=device)).flatten()[0] == 10
    for shape in ((), (2, 5)):
        reason = f"input has {len(shape)} dimensions, got dimension 2"
        refusal(third_size, torch.zeros(shape, device=device), reason, 2)


def one_or_the_other(input, other, output, rows):
    for row in rows:
        chosen = input if row % 2 == 0 else other
        for i in range(input.shape[-1]):
            output[row, i] = chosen[row, i]


def wrong_index_of_either(input, other, output, rows):
    for row in rows:
        chosen = input if row % 2 == 0 else other
        output[row, 0] = chosen[row]


def test_a_variable_that_is_one_tensor_or_another(device):
    schema = "(Tensor input, Tensor other) -> Tensor"
    input, other = torch.randn(2, 4, 3)
    result = define(one_or_the_other, schema)(input.to(device), other.to(device)).cpu()
    assert torch.equal(result[::2], input[::2])
    assert torch.equal(result[1::2], other[1::2])
    wrong = define(wrong_index_of_either, schema)
    with pytest.raises(TypeError, match="the tensor has 2 dimensions and must be given one"):
        wrong(input.to(device), other.to(device))


def positive_lanes(input, output, rows):
    """Write the lanes of positive numbers, and after them their count."""
    for row in rows:
        x, y, count = input.row(row), output.row(row), 0
        zeros = language.splat(language.zero(input), 32)
        for start in range(0, 64, 32):
            found = language.less(zeros, language.load_vector(x, start, 32))
            lane = language.next_lane(found, 0)
            while lane < 32:
                y[count] = start + lane
                count += 1
                lane = language.next_lane(found, lane + 1)
        y[count] = -count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
def test_lanes_of_a_mask_come_one_by_one(dtype, device):
    call = define(positive_lanes, schema="(Tensor input) -> Tensor", contiguous_rows=True)
    wanted = [[], [0], [31], [32], [0, 1, 2, 31, 32, 61], list(range(63))]
    input = torch.full((len(wanted), 64), -1.0)
    for row, lanes in enumerate(wanted):
        input[row, lanes] = 1.0
    result = call(input.to(dtype).to(device)).cpu().double()
    for row, lanes in enumerate(wanted):
        assert result[row, : len(lanes) + 1].tolist() == [*lanes, -len(lanes)]


def fetched_ahead(input, output, rows):
    for row in rows:
        x, y = input.row(row), output.row(row)
        # Far out of bounds: nothing is read.
        language.prefetch_vectors(x, 1 << 40, 16, 3)
        language.prefetch_vectors(input.data, -(1 << 40), 16, 3)
        language.store(y, 0, language.load_vector(x, 0, 4))


def test_what_is_fetched_ahead_need_not_exist(device):
    call = define(fetched_ahead, contiguous_rows=True)
    input = torch.randn(3, 4)
    for is_checked in (False, True):
        with library.check_bounds() if is_checked else nullcontext():
            assert torch.equal(call(input.to(device)).cpu(), input)
    strided = define(fetched_ahead)
    message = "a row may have a stride, so vectors cannot be read from it; pass contiguous_rows"
    with pytest.raises(RuntimeError, match=message):
        strided(input.to(device))


def combined(input, other, output, rows):
    for row in rows:
        a = language.load_vector(input.row(row), 0, 4)
        b = language.load_vector(other.row(row), 0, 4)
        larger = language.maximum(a, b)
        smaller = language.select(language.less(a, b), a, b)
        total = language.fma(larger - smaller, language.absolute(a), b * b + a)
        language.store(output.row(row), 0, total)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8]
)
def test_vectors_of_integers(dtype, device):
    call = define(combined, "(Tensor input, Tensor other) -> Tensor", contiguous_rows=True)
    a = torch.tensor([[-3, 2, 5, 0], [1, -1, 0, 4]])
    b = torch.tensor([[2, -2, 5, 1], [3, 1, -2, 4]])
    if dtype == torch.uint8:
        a, b = a.abs(), b.abs()
    expected = (torch.maximum(a, b) - torch.minimum(a, b)) * a.abs() + b * b + a
    result = call(a.to(dtype).to(device), b.to(dtype).to(device)).cpu()
    assert torch.equal(result, expected.to(dtype))


def larger(input, other, output, rows):
    for row in rows:
        a = language.load_vector(input.row(row), 0, 2)
        b = language.load_vector(other.row(row), 0, 2)
        language.store(output.row(row), 0, language.maximum(a, b))


def test_the_highest_bit_of_unsigned_vectors_is_no_sign(device):
    call = define(larger, "(Tensor input, Tensor other) -> Tensor", contiguous_rows=True)
    a = torch.tensor([[2**63, 1]], dtype=torch.uint64)
    b = torch.tensor([[2, 2**64 - 1]], dtype=torch.uint64)
    assert call(a.to(device), b.to(device)).tolist() == [[2**63, 2**64 - 1]]
