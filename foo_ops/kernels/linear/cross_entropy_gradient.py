"""Compute a block of the gradients of logits, from the logsumexp of each row.

The logits are computed anew, or their exponentials were kept.
"""

from __future__ import annotations

import math

from numba import njit

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.lang.scratch import make_kernel_with_scratch
from foo_ops.kernels.linear.cross_entropy import LOG2E
from foo_ops.kernels.linear.cross_entropy_parameters import argument_types
from foo_ops.kernels.linear.logits import make_logits, make_scratch
from foo_ops.kernels.linear.product import make_block_sums
from foo_ops.kernels.math.exponential import exp, exp2, tanh, tanh_derivative
from foo_ops.kernels.simd.arithmetic import splat
from foo_ops.kernels.simd.memory import load, load_vector, shift, store
from foo_ops.kernels.simd.transpose import make_copy_row, round_up
from foo_ops.kernels.simd.types import ELEMENTS, compute_dtype, lanes_of


def make_gradient_kernel(dtype: str) -> Kernel:
    """Make the kernel for softmax(x) (grad_loss + grad_logsumexp) - grad_loss (the target,
    smoothed), times the derivative of a soft cap.

    A loss that is not ignored has its share of the gradient of the mean, too.
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
    def scale_exponentials(line, count, scale, each):
        scales, all_ = splat(scale, LANES), splat(each, LANES)
        for column in range(0, count, LANES):
            store(line, column, load_vector(line, column, LANES) * scales - all_)

    @njit
    def load_exponentials(parameters, block, memory):
        """Bring what was kept of a block to where its logits would be."""
        panel, columns = panel_of_block(parameters, block), block.column_stop - block.column_start
        for row in range(block.row_start, block.row_stop):
            place = shift(parameters.exponentials, row * parameters.columns + block.column_start)
            for start in range(0, columns, WIDTH):
                line = start // WIDTH * panel + (row - block.row_start) * WIDTH
                count = min(WIDTH, columns - start)
                copy_row(
                    shift(memory.sums, line), shift(place, start), 1, count, round_up(count, LANES)
                )

    @njit
    def share_of_kept(parameters, block, row, logsumexp):
        """Return what turns the exponentials of a row into probabilities."""
        index = block.column_start // parameters.block_columns * parameters.kept_rows + row
        base = load(parameters.bases, index)
        return exp(base - logsumexp)

    @njit
    def base_of(parameters, row):
        """Return the logsumexp of a row, or NaN where infinite logits have no probabilities."""
        result = load(parameters.logsumexp, row)
        return compute(math.nan) if result == compute(math.inf) else result

    @njit
    def slopes(parameters, row, label):
        """Return the gradients of a row's loss and of its logsumexp through all ways."""
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

    def gradient(parameters, block, memory):
        is_kept = block.row_stop <= parameters.kept_rows
        if is_kept:
            load_exponentials(parameters, block, memory)
        else:
            compute_logits(parameters, block, memory)
        panel = panel_of_block(parameters, block)
        columns = block.column_stop - block.column_start
        for row in range(block.row_start, block.row_stop):
            target = load(parameters.target, row)
            slope, scale = slopes(parameters, row, target)
            each = compute(parameters.label_smoothing) * slope / compute(parameters.columns)
            base, label = base_of(parameters, row), target - block.column_start
            if is_kept:
                scale *= share_of_kept(parameters, block, row, base)
            place = row * parameters.grad_logits_row_stride
            place += block.column_start - parameters.first_column
            for start in range(0, columns, WIDTH):
                count = min(WIDTH, columns - start)
                line = shift(memory.sums, start // WIDTH * panel + (row - block.row_start) * WIDTH)
                has_target = start <= label < start + count and target != parameters.ignore_index
                of_target = compute(0.0)
                if has_target:
                    of_target = gradient_of_target(parameters, load(line, label - start), slope)
                if is_kept:
                    scale_exponentials(line, count, scale, each)
                elif parameters.softcap > 0.0:
                    differentiate_capped(parameters, line, count, base, scale, each)
                else:
                    differentiate(line, count, base, scale, each)
                if has_target:
                    store(line, label - start, load(line, label - start) - of_target)
                copy_row(shift(parameters.grad_logits, place + start), line, 1, count, 0)

    return make_kernel_with_scratch(gradient, layout, argument_types(dtype))
