"""Cross-entropy, and its gradient, of rows whose logits exist only a block at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import types

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.reduction import accumulate, reduce_add, reduce_maximum
from foo_ops.kernels.lang.scratch import Scratch, Struct, make_kernel_with_scratch
from foo_ops.kernels.linear.product import BLOCK, make_block_sums
from foo_ops.kernels.math.exponential import exp, exp2, log, tanh, tanh_derivative
from foo_ops.kernels.simd.arithmetic import maximum, splat
from foo_ops.kernels.simd.memory import load, load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row, round_up
from foo_ops.kernels.simd.types import ELEMENTS, Pointer, compute_dtype, lanes_of

# -------------------------------------------------------------------------- parameters of launchers

# The parameters that launchers pass to the kernels of foo::linear_cross_entropy.


COUNTS = (
    *("rows", "columns", "depth", "has_bias", "ignore_index", "split_columns", "first_column"),
    *("has_grad_loss", "has_grad_logsumexp", "kept_rows", "block_columns"),
)
NUMBERS = ("softcap", "softcap_inverse", "label_smoothing", "grad_mean_share")


def gradient_dtype(dtype: str) -> str:
    """The dtype in which gradients of logits enter products.

    They may be too small for float16, whose products are computed in float32 anyway.
    """
    return dtype if dtype == "bfloat16" else compute_dtype(dtype)


def argument_types(dtype: str) -> tuple[Any, ...]:
    """Types of the parameters, the block, scratch memory and the pointer for its size."""
    return (_parameters(dtype), BLOCK, Pointer(compute_dtype(dtype)), Pointer("int64"))


def _parameters(dtype: str) -> Struct:
    """The struct CrossEntropy of foo_ops/csrc/ops/linear/cross_entropy.h.

    Strides are in elements.
    """
    number, pointer, sums = types.int64, Pointer(dtype), Pointer(compute_dtype(dtype))
    fields: list[tuple[str, types.Type]] = [(name, number) for name in COUNTS]
    fields += [(name, types.float64) for name in NUMBERS]
    fields += [("left", pointer), ("left_row_stride", number), ("left_step_stride", number)]
    fields += [("right", pointer), ("right_column_stride", number), ("right_step_stride", number)]
    fields += [("bias", pointer), ("bias_column_stride", number), ("target", Pointer("int64"))]
    fields += [(name, sums) for name in ("largest", "total", "logit_sum", "loss", "logsumexp")]
    fields += [(name, sums) for name in ("grad_loss", "grad_logsumexp")]
    factors = Pointer(gradient_dtype(dtype))
    fields += [("grad_logits", factors), ("grad_logits_row_stride", number)]
    fields += [("exponentials", factors), ("bases", sums)]
    return Struct("CrossEntropy", tuple(fields))


# ------------------------------------------------------------------------------------------- logits

# Computes a block of logits: a product plus a bias.


@functools.cache
def make_scratch(dtype: str) -> Scratch:
    sums = make_block_sums(dtype)
    return Scratch(compute_dtype(dtype), sums.sizes_of_block, sums.describe)


@functools.cache
def make_logits(dtype: str) -> Callable:
    """Make ``compute_logits(parameters, block, memory)``.

    The logits, before the soft cap, are left in ``memory.sums``, in whole vectors: see
    `foo_ops.kernels.linear.product.BlockSums`.
    """
    sums, compute = make_block_sums(dtype), compute_dtype(dtype)
    compute_sums, panel_of_block, WIDTH = sums.compute, sums.panel_of_block, sums.width
    LANES, copy_row = lanes_of(compute), make_copy_row(compute)

    @njit
    def add_bias(parameters, block, memory):
        rows, columns = block.row_stop - block.row_start, block.column_stop - block.column_start
        panel = panel_of_block(parameters, block)
        stride = parameters.bias_column_stride
        copy_row(
            memory.bias, shift(parameters.bias, block.column_start * stride), stride, columns,
            round_up(columns, LANES),
        )  # fmt: skip
        for start in range(0, columns, WIDTH):
            bias = shift(memory.bias, start)
            for row in range(rows):
                line = shift(memory.sums, start // WIDTH * panel + row * WIDTH)
                for column in range(0, min(WIDTH, columns - start), LANES):
                    value = load_vector(line, column, LANES) + load_vector(bias, column, LANES)
                    store(line, column, value)

    @njit
    def compute_logits(parameters, block, memory):
        compute_sums(parameters, block, memory)
        if parameters.has_bias:
            add_bias(parameters, block, memory)

    return compute_logits


# ------------------------------------------------------------------------------ statistics and loss

# Computes the cross-entropy of rows whose logits exist a block at a time, in scratch memory.
#
# A thread goes through the blocks of a split (some of the classes), and keeps for each row the
# maximum m of the logits so far and the sum of exp(x - m). A block with a larger maximum m' turns
# the sum into sum * exp(m - m') plus the block's own sum (Milakov and Gimelshein 2018,
# algorithm 3). Another kernel merges the splits of each row.


LOG2E = 1.0 / math.log(2.0)


@functools.cache
def make_row_sums(dtype: str) -> tuple[Callable, ...]:
    """Make the functions that reduce a row of a block, whose panels are ``panel`` elements apart.

    Each takes ``(line, panel, columns)``. After the columns, vectors are padded with -infinity.
    """
    compute, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))
    WIDTH = make_block_sums(dtype).width

    @njit
    def largest_of_row(line, panel, columns):
        """Return the maximum; with a NaN in the row, the result is arbitrary."""
        result = splat(compute(-math.inf), LANES)
        for start in range(0, columns, WIDTH):
            place = shift(line, start // WIDTH * panel)
            for column in range(0, min(WIDTH, columns - start), LANES):
                result = maximum(load_vector(place, column, LANES), result)
        return reduce_maximum(result)

    @njit
    def leave_exponentials(line, panel, columns, base):
        """Replace each x by exp(x - base), and return the sum."""
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
        """Return the sum of ``logit - base``; the difference keeps precision for large logits."""
        result = compute(0.0)
        for start in range(0, columns, WIDTH):
            place = shift(line, start // WIDTH * panel)
            for column in range(min(WIDTH, columns - start)):
                result = accumulate(result, load(place, column) - base)
        return result

    @njit
    def one_or_nan(line, panel, columns):
        """Return 1, the sum of a row with an infinite maximum, or NaN if the row has a NaN."""
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
    """Make ``base_of(largest)``: the base to subtract from logits; 0 if no logit was seen yet."""
    compute = ELEMENTS[dtype].compute

    @njit
    def base_of(largest):
        return compute(0.0) if largest == compute(-math.inf) else largest

    return base_of


def make_statistics_kernel(dtype: str) -> Kernel:
    """Make the kernel that adds a block's logits to its rows' maxima and sums in one split."""
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
        """Add a row's logits to the statistics of its split, which has seen ``seen`` columns.

        It replaces the logits by their exponentials, and returns the maximum so far, their base.
        """
        before, total, logit_sum = compute(-math.inf), compute(0.0), compute(0.0)
        if seen > 0:
            before, total = load(parameters.largest, index), load(parameters.total, index)
        largest = max(before, largest_of_row(line, panel, columns))
        base = base_of(largest)
        if parameters.label_smoothing != 0.0:
            if seen > 0:
                logit_sum = load(parameters.logit_sum, index)
                logit_sum += (base_of(before) - base) * compute(seen)
            logit_sum += sum_of_differences(line, panel, columns, base)
            store(parameters.logit_sum, index, logit_sum)
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
                # The loss's memory holds the target's logit until the loss is computed.
                value = load(shift(line, label // WIDTH * panel), label % WIDTH)
                store(parameters.loss, row, value)
            index = split * parameters.rows + row
            base = add_to_sums(parameters, line, panel, columns, index, seen)
            if row < parameters.kept_rows:
                keep(parameters, row, block.column_start, line, panel, columns, base)

    return make_kernel_with_scratch(statistics, layout, argument_types(dtype))


def make_loss_kernel(dtype: str) -> Kernel:
    """Make the kernel that merges the splits of each row to its loss and logsumexp."""
    compute, base_of = ELEMENTS[dtype].compute, make_base(dtype)

    @njit
    def no_sizes(parameters, block):
        return (0,)

    def describe(size: Any) -> dict[str, Any]:
        return {}

    @njit
    def merge(parameters, row):
        """Return maximum, sum of exponentials, and sum of differences."""
        largest, total, logit_sum = compute(-math.inf), compute(0.0), compute(0.0)
        for start in range(0, parameters.columns, parameters.split_columns):
            index = start // parameters.split_columns * parameters.rows + row
            largest = max(largest, load(parameters.largest, index))
        base = base_of(largest)
        for start in range(0, parameters.columns, parameters.split_columns):
            index = start // parameters.split_columns * parameters.rows + row
            own = load(parameters.largest, index)
            share = load(parameters.total, index)
            # The difference of equal infinities is NaN.
            total += share if own == largest else share * exp(own - largest)
            if parameters.label_smoothing != 0.0:
                count = min(parameters.split_columns, parameters.columns - start)
                of_split = load(parameters.logit_sum, index)
                logit_sum += of_split + (base_of(own) - base) * compute(count)
        return largest, total, logit_sum

    def compute_losses(parameters, block, memory):
        smoothing = compute(parameters.label_smoothing)
        for row in range(block.row_start, block.row_stop):
            largest, total, logit_sum = merge(parameters, row)
            rest = log(total)
            store(parameters.logsumexp, row, largest + rest)
            loss = compute(0.0)
            if load(parameters.target, row) != parameters.ignore_index:
                # Subtract the logits first: a large logit would swallow the logarithm.
                difference = largest - load(parameters.loss, row)
                if largest == compute(math.inf):
                    # As in softmax, an infinite logit leaves no probabilities: the loss is NaN.
                    rest = compute(math.nan)
                loss = rest + (compute(1.0) - smoothing) * difference
                if parameters.label_smoothing != 0.0:
                    loss -= smoothing * logit_sum / compute(parameters.columns)
            store(parameters.loss, row, loss)

    layout = Scratch(compute_dtype(dtype), no_sizes, describe)
    return make_kernel_with_scratch(compute_losses, layout, argument_types(dtype))


# --------------------------------------------------------------------------- gradient of the logits

# Computes a block of the gradients of logits, from the logsumexp of each row.
#
# The logits are recomputed, unless their exponentials were kept.


def make_gradient_kernel(dtype: str) -> Kernel:
    """Make the kernel that computes the gradients of logits.

    They are softmax(x) (grad_loss + grad_logsumexp) - grad_loss (the target, smoothed), times the
    derivative of a soft cap. Each loss that is not ignored also has its share of the gradient of
    the mean.
    """
    compute, LANES = ELEMENTS[dtype].compute, lanes_of(compute_dtype(dtype))
    sums, compute_logits, layout = make_block_sums(dtype), make_logits(dtype), make_scratch(dtype)
    panel_of_block, WIDTH = sums.panel_of_block, sums.width
    copy_row = make_copy_row(compute_dtype(dtype))

    @njit
    def differentiate(line, count, base, scale, each):
        bases, scales, all_ = splat(base, LANES), splat(scale, LANES), splat(each, LANES)
        factor = splat(compute(LOG2E), LANES)
        for column in range(0, count, LANES):
            power = exp2((load_vector(line, column, LANES) - bases) * factor)
            store(line, column, power * scales - all_)

    @njit
    def differentiate_capped(parameters, line, count, base, scale, each):
        bases, scales, all_ = splat(base, LANES), splat(scale, LANES), splat(each, LANES)
        factor = splat(compute(LOG2E), LANES)
        caps = splat(compute(parameters.softcap), LANES)
        inverse = splat(compute(parameters.softcap_inverse), LANES)
        for column in range(0, count, LANES):
            share = load_vector(line, column, LANES) * inverse
            power = exp2((caps * tanh(share) - bases) * factor)
            store(line, column, (power * scales - all_) * tanh_derivative(share))

    @njit
    def scale_exponentials(target, source, count, scale, each):
        """Write the gradients of a row's logits from their exponentials, in one pass.

        By way of scratch memory, panel by panel, a Zen 4 takes 5 times as long.
        """
        scales, all_, whole = splat(scale, LANES), splat(each, LANES), count // LANES * LANES
        for column in range(0, whole, LANES):
            store(target, column, load_vector(source, column, LANES) * scales - all_)
        for column in range(whole, count):
            store(target, column, load(source, column) * scale - each)

    @njit
    def share_of_kept(parameters, block, row, logsumexp):
        """Return the factor that turns the exponentials of a row into probabilities."""
        index = block.column_start // parameters.block_columns * parameters.kept_rows + row
        base = load(parameters.bases, index)
        return exp(base - logsumexp)

    @njit
    def base_of(parameters, row):
        """Return the logsumexp of a row, or NaN if it is infinite: no probabilities exist then."""
        result = load(parameters.logsumexp, row)
        return compute(math.nan) if result == compute(math.inf) else result

    @njit
    def slopes(parameters, row, label):
        """Return the gradients of a row's loss, and of its logsumexp through both outputs."""
        of_loss, of_logsumexp = compute(0.0), compute(0.0)
        if label != parameters.ignore_index:
            of_loss = compute(parameters.grad_mean_share)
            if parameters.has_grad_loss:
                of_loss += load(parameters.grad_loss, row)
        if parameters.has_grad_logsumexp:
            of_logsumexp = load(parameters.grad_logsumexp, row)
        return of_loss, of_loss + of_logsumexp

    @njit
    def gradient_of_target(parameters, logit, slope):
        result = compute(1.0 - parameters.label_smoothing) * slope
        if parameters.softcap > 0.0:
            result *= tanh_derivative(logit * compute(parameters.softcap_inverse))
        return result

    @njit
    def factors_of_row(parameters, row, target):
        """Return the slope of a row's loss, the factor of its probabilities and what all lose."""
        slope, scale = slopes(parameters, row, target)
        each = compute(parameters.label_smoothing) * slope / compute(parameters.columns)
        return slope, scale, each

    @njit
    def line_of_gradients(parameters, block, row):
        place = row * parameters.grad_logits_row_stride
        return shift(parameters.grad_logits, place + block.column_start - parameters.first_column)

    @njit
    def differentiate_kept(parameters, block):
        columns = block.column_stop - block.column_start
        for row in range(block.row_start, block.row_stop):
            target = load(parameters.target, row)
            slope, scale, each = factors_of_row(parameters, row, target)
            scale *= share_of_kept(parameters, block, row, base_of(parameters, row))
            line = line_of_gradients(parameters, block, row)
            source = shift(parameters.exponentials, row * parameters.columns + block.column_start)
            scale_exponentials(line, source, columns, scale, each)
            label = target - block.column_start
            if 0 <= label < columns and target != parameters.ignore_index:
                # Exponentials of a capped logit are not kept.
                of_target = gradient_of_target(parameters, compute(0.0), slope)
                store(line, label, load(source, label) * scale - each - of_target)

    @njit
    def differentiate_logits(parameters, block, memory):
        panel = panel_of_block(parameters, block)
        columns = block.column_stop - block.column_start
        for row in range(block.row_start, block.row_stop):
            target = load(parameters.target, row)
            slope, scale, each = factors_of_row(parameters, row, target)
            base, label = base_of(parameters, row), target - block.column_start
            gradients = line_of_gradients(parameters, block, row)
            for start in range(0, columns, WIDTH):
                count = min(WIDTH, columns - start)
                line = shift(memory.sums, start // WIDTH * panel + (row - block.row_start) * WIDTH)
                has_target = start <= label < start + count and target != parameters.ignore_index
                of_target = compute(0.0)
                if has_target:
                    of_target = gradient_of_target(parameters, load(line, label - start), slope)
                if parameters.softcap > 0.0:
                    differentiate_capped(parameters, line, count, base, scale, each)
                else:
                    differentiate(line, count, base, scale, each)
                if has_target:
                    store(line, label - start, load(line, label - start) - of_target)
                copy_row(shift(gradients, start), line, 1, count, 0)

    def gradient(parameters, block, memory):
        if block.row_stop <= parameters.kept_rows:
            differentiate_kept(parameters, block)
        else:
            compute_logits(parameters, block, memory)
            differentiate_logits(parameters, block, memory)

    return make_kernel_with_scratch(gradient, layout, argument_types(dtype))
