"""Operators of the kit for tests, with rows that processes can share and without."""

import torch

from foo_ops import language, library


def define(name, schema, kernel, fake=None):
    library.define(f"sharded::{name}", schema)
    if fake is not None:
        library.register_fake(f"sharded::{name}", fake)
    library.register_kernel(f"sharded::{name}", ("cpu", "foo"), kernel)
    return getattr(torch.ops.sharded, name)


@library.numba_op("sharded::leaky", backward=lambda grad, x, slope: grad if x > 0 else slope * grad)
def leaky(x: float, slope: float = 0.1) -> float:
    return x if x > 0 else slope * x


@library.tile_kernel
def row_sum_kernel(input, scale, output, rows):
    for row in rows:
        x, total = input.row(row), language.zero(input)
        for i in range(input.shape[-1]):
            total = language.accumulate(total, x[i] * scale[i])
        output.flat[row] = total


row_sum = define(
    "row_sum",
    "(Tensor input, Tensor scale) -> Tensor",
    row_sum_kernel,
    lambda input, scale: input.new_empty(input.shape[:-1]),
)


@library.tile_kernel
def scale_rows_kernel(input, scale, rows):
    for row in rows:
        x = input.row(row)
        for i in range(input.shape[-1]):
            x[i] *= scale[row]


scale_rows_ = define(
    "scale_rows_",
    "(Tensor(a!) input, Tensor scale) -> Tensor(a!)",
    scale_rows_kernel,
    lambda input, scale: input,
)


@library.tile_kernel
def neighbours_kernel(input, output, rows):
    for row in rows:
        x, y = input.row(row), output.row(row)
        before = input.row(max(row - 1, 0))
        for i in range(input.shape[-1]):
            y[i] = x[i] - before[i]


neighbours = define("neighbours", "(Tensor input) -> Tensor", neighbours_kernel, torch.empty_like)


@library.tile_kernel(tiles=lambda output: output.size)
def columns_kernel(input, output, columns):
    for column in columns:
        total = language.zero(input)
        for row in range(input.shape[0]):
            total += input[row, column]
        output[column] = total


column_sum = define(
    "column_sum",
    "(Tensor input) -> Tensor",
    columns_kernel,
    lambda input: input.new_empty(input.shape[1:]),
)
declared_column_sum = define(
    "declared_column_sum",
    "(Tensor input) -> Tensor",
    columns_kernel,
    lambda input: input.new_empty(input.shape[1:]),
)
library.register_sharding("sharded::declared_column_sum", "rows columns -> columns")
