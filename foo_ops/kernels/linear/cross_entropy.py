"""Compute the cross-entropy of rows whose logits exist a block at a time, in scratch memory.

A thread goes through blocks of a split, which is some of the classes, and keeps for each row the
maximum m of the logits so far and the sum of exp(x - m): a block with a larger maximum m' turns it
into sum * exp(m - m') plus its own share (Milakov and Gimelshein 2018, algorithm 3). Another kernel
merges the splits of each row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.reduction import accumulate, reduce_add, reduce_maximum
from foo_ops.kernels.lang.scratch import Scratch, make_kernel_with_scratch
from foo_ops.kernels.linear.cross_entropy_parameters import argument_types
from foo_ops.kernels.linear.logits import make_logits, make_scratch
from foo_ops.kernels.linear.product import make_block_sums
from foo_ops.kernels.math.exponential import exp, exp2, log, tanh
from foo_ops.kernels.simd.arithmetic import maximum, splat
from foo_ops.kernels.simd.memory import load, load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of

LOG2E = 1.0 / math.log(2.0)


@functools.cache
def make_row_sums(dtype: str) -> tuple[Callable, ...]:
    """Make what looks at a row of a block, whose panels are ``panel`` elements apart.

    Each takes ``(line, panel, columns)``. Behind the columns, vectors are filled up with -infinity.
    """
    compute, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))
    WIDTH = make_block_sums(dtype).width

    @njit
    def largest_of_row(line, panel, columns):
        """Return the maximum, or any number where there is a NaN."""
        result = splat(compute(-math.inf), LANES)
        for start in range(0, columns, WIDTH):
            place = shift(line, start // WIDTH * panel)
            for column in range(0, min(WIDTH, columns - start), LANES):
                result = maximum(load_vector(place, column, LANES), result)
        return reduce_maximum(result)

    @njit
    def leave_exponentials(line, panel, columns, base):
        """Write exp(x - base) in the place of each x, and return their sum."""
        result, base_of_lanes = splat(compute(0.0), LANES), splat(base, LANES)
        factor = splat(compute(LOG2E), LANES)
        for start in range(0, columns, WIDTH):
            place = shift(line, start // WIDTH * panel)
            for column in range(0, min(WIDTH, columns - start), LANES):
                power = exp2((load_vector(place, column, LANES) - base_of_lanes) * factor)
                store(place, column, power)
                result = result + power
        return reduce_add(result)

    @njit
    def sum_of_differences(line, panel, columns, base):
        """Return the sum of the logits less ``base``, which keeps the digits of large ones."""
        result = compute(0.0)
        for start in range(0, columns, WIDTH):
            place = shift(line, start // WIDTH * panel)
            for column in range(min(WIDTH, columns - start)):
                result = accumulate(result, load(place, column) - base)
        return result

    @njit
    def one_or_nan(line, panel, columns):
        """Return 1, the sum of a row with an infinite maximum, or NaN where there is one."""
        result = compute(1.0)
        for start in range(0, columns, WIDTH):
            place = shift(line, start // WIDTH * panel)
            for column in range(min(WIDTH, columns - start)):
                value = load(place, column)
                if value != value:
                    result = value
        return result

    return largest_of_row, leave_exponentials, sum_of_differences, one_or_nan


@functools.cache
def make_base(dtype: str) -> Callable:
    """Make ``base_of(largest)``: what exponents are less, a number also where nothing was seen."""
    compute = ELEMENTS[dtype].compute

    @njit
    def base_of(largest):
        return compute(0.0) if largest == compute(-math.inf) else largest

    return base_of


def make_statistics_kernel(dtype: str) -> Kernel:
    """Make the kernel that takes a block into maximum and sums of its rows, in one split."""
    compute, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))
    sums, compute_logits, layout = make_block_sums(dtype), make_logits(dtype), make_scratch(dtype)
    panel_of_block, WIDTH = sums.panel_of_block, sums.width
    largest_of_row, leave_exponentials, sum_of_differences, one_or_nan = make_row_sums(dtype)
    base_of, copy_row = make_base(dtype), make_copy_row(compute_dtype(dtype))

    @njit
    def cap(parameters, line, panel, columns):
        caps = splat(compute(parameters.softcap), LANES)
        inverse = splat(compute(parameters.softcap_inverse), LANES)
        for start in range(0, columns, WIDTH):
            place = shift(line, start // WIDTH * panel)
            for column in range(0, min(WIDTH, columns - start), LANES):
                store(place, column, caps * tanh(load_vector(place, column, LANES) * inverse))

    @njit
    def fill_up(line, panel, columns):
        last = shift(line, columns // WIDTH * panel)
        for column in range(columns % WIDTH, round_up(columns % WIDTH, LANES)):
            store(last, column, compute(-math.inf))

    @njit
    def add_to_sums(parameters, line, panel, columns, index, seen):
        """Take a row's logits into the statistics of its split, which has seen some columns.

        It leaves their exponentials, and returns the maximum so far, which is their base.
        """
        before, total, plain = compute(-math.inf), compute(0.0), compute(0.0)
        if seen > 0:
            before, total = load(parameters.largest, index), load(parameters.total, index)
        largest = max(before, largest_of_row(line, panel, columns))
        base = base_of(largest)
        if parameters.label_smoothing != 0.0:
            if seen > 0:
                plain = load(parameters.plain, index) + (base_of(before) - base) * compute(seen)
            plain += sum_of_differences(line, panel, columns, base)
            store(parameters.plain, index, plain)
        if seen > 0 and largest > before:
            total *= exp(before - largest)
        is_infinite = largest == compute(math.inf)
        if is_infinite:
            total += one_or_nan(line, panel, columns)
        of_exponentials = leave_exponentials(line, panel, columns, base)
        if not is_infinite:
            total += of_exponentials
        store(parameters.largest, index, largest)
        store(parameters.total, index, total)
        return largest

    @njit
    def keep(parameters, row, column_start, line, panel, columns, base):
        block = column_start // parameters.block_columns
        store(parameters.bases, block * parameters.kept_rows + row, base)
        place = shift(parameters.exponentials, row * parameters.columns + column_start)
        for start in range(0, columns, WIDTH):
            count = min(WIDTH, columns - start)
            copy_row(shift(place, start), shift(line, start // WIDTH * panel), 1, count, 0)

    def statistics(parameters, block, memory):
        compute_logits(parameters, block, memory)
        panel, columns = panel_of_block(parameters, block), block.column_stop - block.column_start
        split = block.column_start // parameters.split_columns
        seen = block.column_start - split * parameters.split_columns
        for row in range(block.row_start, block.row_stop):
            line = shift(memory.sums, (row - block.row_start) * WIDTH)
            if parameters.softcap > 0.0:
                cap(parameters, line, panel, columns)
            fill_up(line, panel, columns)
            label = load(parameters.target, row) - block.column_start
            if 0 <= label < columns:
                # The logit of the target waits where the loss will be.
                value = load(shift(line, label // WIDTH * panel), label % WIDTH)
                store(parameters.loss, row, value)
            index = split * parameters.rows + row
            base = add_to_sums(parameters, line, panel, columns, index, seen)
            if row < parameters.kept_rows:
                keep(parameters, row, block.column_start, line, panel, columns, base)

    return make_kernel_with_scratch(statistics, layout, argument_types(dtype))


def make_loss_kernel(dtype: str) -> Kernel:
    """Make the kernel that merges the splits of each row of a block to its loss and logsumexp."""
    compute, base_of = ELEMENTS[dtype].compute, make_base(dtype)

    @njit
    def no_sizes(parameters, block):
        return (0,)

    def describe(size: Any) -> dict[str, Any]:
        return {}

    @njit
    def merge(parameters, row):
        """Return maximum, sum of exponentials, and sum of differences."""
        largest, total, plain = compute(-math.inf), compute(0.0), compute(0.0)
        for start in range(0, parameters.columns, parameters.split_columns):
            index = start // parameters.split_columns * parameters.rows + row
            largest = max(largest, load(parameters.largest, index))
        base = base_of(largest)
        for start in range(0, parameters.columns, parameters.split_columns):
            index = start // parameters.split_columns * parameters.rows + row
            own = load(parameters.largest, index)
            share = load(parameters.total, index)
            # Infinities have no difference.
            total += share if own == largest else share * exp(own - largest)
            if parameters.label_smoothing != 0.0:
                count = min(parameters.split_columns, parameters.columns - start)
                plain += load(parameters.plain, index) + (base_of(own) - base) * compute(count)
        return largest, total, plain

    def compute_losses(parameters, block, memory):
        smoothing = compute(parameters.label_smoothing)
        for row in range(block.row_start, block.row_stop):
            largest, total, plain = merge(parameters, row)
            rest = log(total)
            store(parameters.logsumexp, row, largest + rest)
            loss = compute(0.0)
            if load(parameters.target, row) != parameters.ignore_index:
                # Differences come first: beside a large logit nothing is left of the logarithm.
                difference = largest - load(parameters.loss, row)
                if largest == compute(math.inf):
                    # As in softmax: beside an infinite logit nothing has a probability.
                    rest = compute(math.nan)
                loss = rest + (compute(1.0) - smoothing) * difference
                if parameters.label_smoothing != 0.0:
                    loss -= smoothing * plain / compute(parameters.columns)
            store(parameters.loss, row, loss)

    layout = Scratch(compute_dtype(dtype), no_sizes, describe)
    return make_kernel_with_scratch(compute_losses, layout, argument_types(dtype))
