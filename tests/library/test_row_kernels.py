"""A tile kernel's source shows whether it computes each row independently."""

import pytest

from foo_ops import language
from foo_ops.kernels.compiler.inspection import row_dimensions


def by_rows(input, weight, output, sums, rows):
    for row in rows:
        x, y, total = input.row(row), output.row(row), language.zero(input)
        for i in range(input.shape[-1]):
            y[i] = x[i] * weight[i] if weight is not None else x[i]
        sums.flat[row] = language.cast(total, sums)


def by_indices(input, weight, output, sums, rows):
    for row in rows:
        if input.ndim == 2:
            output[row, 0] = input[row, 0] + weight[0]
        sums[row] = input[row, -1]


def another_row(input, weight, output, sums, rows):
    for row in rows:
        output.row(row)[0] = input.row(row + 1)[0]
        sums.flat[row] = weight[0]


def number_of_rows(input, weight, output, sums, rows):
    for row in rows:
        output.row(row)[0] = input.row(row)[0] / input.rows
        sums.flat[row] = weight[0]


def size_of_rows(input, weight, output, sums, rows):
    for row in rows:
        output.row(row)[0] = input.row(row)[0] / input.shape[0]
        sums.flat[row] = weight[0]


def number_of_the_row(input, weight, output, sums, rows):
    for row in rows:
        output.row(row)[0] = input.row(row)[0] + row
        sums.flat[row] = weight[0]


def elsewhere(input, weight, output, sums, rows):
    for row in rows:
        output.row(row)[0] = input.row(row)[0]
        sums.flat[0] += weight[row]


def handed_over(input, weight, output, sums, rows):
    for row in rows:
        number_of_rows(input, weight, output, sums, range(row, row + 1))


def changed(input, weight, output, sums, rows):
    for row in rows:
        row = row + 1
        output.row(row)[0] = input.row(row)[0] + weight[0]
        sums.flat[row] = 0.0


def not_a_loop(input, weight, output, sums, rows):
    for row in range(len(rows)):
        output.row(row)[0] = input.row(row)[0] + weight[0]
        sums.flat[row] = 0.0


def read(function):
    tensors = ("input", "weight", "output", "sums")
    return row_dimensions(function, tensors, tensors[2:])


def test_rows():
    assert read(by_rows) == {"input": 1, "weight": None, "output": 1, "sums": 0}
    assert read(by_indices) == {"input": 1, "weight": None, "output": 1, "sums": 0}


@pytest.mark.parametrize(
    "function",
    [
        *(another_row, number_of_rows, size_of_rows, number_of_the_row, elsewhere, handed_over),
        *(changed, not_a_loop, lambda input, weight, output, sums, rows: None),
    ],
    ids=lambda function: function.__name__,
)
def test_others(function):
    assert read(function) is None


def test_without_source():
    namespace = {}
    exec("def kernel(input, rows):\n    for row in rows:\n        input.flat[row] = 0", namespace)
    assert row_dimensions(namespace["kernel"], ["input"], ["input"]) is None
