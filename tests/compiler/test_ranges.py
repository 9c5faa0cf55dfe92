"""Loops over range in kernels visit the same numbers as in Python."""

import pytest
import torch

from foo_ops import library

ROOM = 80
NOTHING = -1000
# (start, stop, step)
RANGES = [
    *((0, 7, 1), (3, 7, 1), (-5, 2, 1), (7, 7, 1), (9, 7, 1)),
    *((0, 24, 8), (0, 25, 8), (0, 23, 8), (-9, 9, 8), (9, -9, 8), (1, 0, 8)),
    *((7, 0, -1), (7, 0, -3), (7, 1, -3), (0, 7, -3), (0, 0, -3), (-1, 0, -3)),
]


def written(number, output, place):
    output[place] = number
    return place + 1


def of_three(start, stop, step, output, place):
    for number in range(start, stop, step):
        place = written(number, output, place)
    return place


def of_two(start, stop, step, output, place):
    for number in range(start, stop):
        place = written(number, output, place)
    return place


def of_one(start, stop, step, output, place):
    for number in range(stop):
        place = written(number, output, place)
    return place


def up_by_eight(start, stop, step, output, place):
    for number in range(start, stop, 8):
        place = written(number, output, place)
    return place


def down_by_three(start, stop, step, output, place):
    for number in range(start, stop, -3):
        place = written(number, output, place)
    return place


def twice_the_same(start, stop, step, output, place):
    numbers = range(start, stop, step)
    for number in numbers:
        if number == 5:
            continue
        for other in numbers:
            if other == 3:
                break
            place = written(number - other, output, place)
    return place


def with_length(start, stop, step, output, place):
    return written(len(range(start, stop, step)), output, place)


FUNCTIONS = (of_three, of_two, of_one, up_by_eight, down_by_three, twice_the_same, with_length)


def operator_of(function):
    name = function.__name__
    lib = library.Library("foo_ranges", "FRAGMENT")
    lib.define(f"{name}(Tensor room, int start, int stop, int step) -> Tensor")
    library.register_fake(f"foo_ranges::{name}", lambda room, *_: torch.empty_like(room), lib=lib)

    @library.register_kernel(f"foo_ranges::{name}", "cpu", lib=lib)
    @library.tile_kernel
    def kernel(room, start, stop, step, output, rows):
        for row in rows:
            line = output.row(row)
            for place in range(room.shape[-1]):
                line[place] = NOTHING
            function(start, stop, step, line, 0)

    # The library lives as long as its operator is needed.
    return lib, getattr(torch.ops.foo_ranges, name)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_numbers(function):
    _lib, operator = operator_of(function)
    for numbers in RANGES:
        expected = [NOTHING] * ROOM
        function(*numbers, expected, 0)
        room = torch.zeros(2, ROOM, dtype=torch.int64)
        assert operator(room, *numbers).tolist() == [expected] * 2, numbers


def test_of_int32():
    lib = library.Library("foo_ranges", "FRAGMENT")
    lib.define("of_int32(Tensor bounds) -> Tensor")
    library.register_fake("foo_ranges::of_int32", torch.empty_like, lib=lib)

    @library.register_kernel("foo_ranges::of_int32", "cpu", lib=lib)
    @library.tile_kernel
    def kernel(bounds, output, rows):
        for row in rows:
            first, last = bounds.row(row)[0], bounds.row(row)[1]
            for number in range(first, last):
                output.row(row)[number - first] = number

    bounds = torch.tensor([[-3, 4, 0, 0, 0, 0, 0]], dtype=torch.int32)
    assert torch.ops.foo_ranges.of_int32(bounds).tolist() == [list(range(-3, 4))]


def test_a_step_of_zero_visits_nothing():
    """Python raises, which a kernel cannot."""
    _lib, operator = operator_of(of_three)
    room = torch.zeros(1, ROOM, dtype=torch.int64)
    assert operator(room, 0, 5, 0).tolist() == [[NOTHING] * ROOM]
