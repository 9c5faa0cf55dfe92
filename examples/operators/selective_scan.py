"""The selective scan of Mamba (Gu and Dao 2023, algorithm 2), for one pass over a sequence.

    h[t, d, n] = exp(delta[t, d] * A[d, n]) * h[t - 1, d, n] + delta[t, d] * B[t, n] * u[t, d]
    output[t, d] = sum_n C[t, n] * h[t, d, n] + D[d] * u[t, d]

Shows a recurrence: tiles are independent parts (channels of a sequence), states are vectors in
scratch memory, padded with zeros, and the backward pass recomputes the states instead of keeping
them all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
ARGUMENTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None"
library.define(
    "examples::selective_scan", f"({ARGUMENTS}) -> (Tensor output, Tensor last_state)", tags=TAGS
)
library.define(
    "examples::selective_scan_backward",
    f"(Tensor grad_output, Tensor grad_last_state, {ARGUMENTS}) -> (Tensor grad_u, "
    "Tensor grad_delta, Tensor grad_A, Tensor grad_B, Tensor grad_C, Tensor grad_D)",
    tags=TAGS,
)
MOST_PARTS = 8
LOG2E, LN2 = 1 / math.log(2), math.log(2)


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output (batch, T, channels) and the last state (batch, channels, N).

    ``u`` and ``delta`` are (batch, T, channels), ``A`` (channels, N), ``B`` and ``C`` (batch, T, N)
    and ``D`` (channels,), all of one dtype. The state is float32 for half precision.
    """
    return torch.ops.examples.selective_scan(u, delta, A, B, C, D)


# ---------------------------------------------------------------------------------------- kernels


def add_parts(sums: Any, parts: Any, rows: Any, target: Any) -> None:
    """Sum blocks of ``rows`` rows, and write the sum to as many rows of the target."""
    for row in range(rows):
        y = target.row(row)
        for i in range(target.shape[-1]):
            total = language.zero(sums)
            for part in range(parts):
                total += sums.row(part * rows + row)[i]
            y[i] = total


def add_up(
    u: Any, grad_A: Any, grad_B: Any, grad_C: Any, grad_D: Any,
    sums_of_A: Any, sums_of_B: Any, sums_of_C: Any, sums_of_D: Any,
) -> None:  # fmt: skip
    add_parts(sums_of_A, u.shape[0], grad_A.rows, grad_A)
    add_parts(sums_of_B, sums_of_B.shape[0], grad_B.rows, grad_B)
    add_parts(sums_of_C, sums_of_C.shape[0], grad_C.rows, grad_C)
    if grad_D.size > 0:
        add_parts(sums_of_D, u.shape[0], 1, grad_D)


def count_parts(u: Any) -> int:
    return min(u.shape[2], MOST_PARTS)


def count_steps(u: Any) -> int:
    return u.shape[0] * u.shape[1]


def count_states(A: Any) -> int:
    """Round the number of states up to whole vectors; padding stays zero."""
    step = language.lanes(A)
    return (A.shape[1] + step - 1) // step * step


# Each part of a sequence's channels has its own sums for B and C; each sequence its own for A and
# D. A thread has A of a channel, B and C of a sequence, the decays and states of a channel, and the
# gradient of its state.
PARTS = library.scratch(count_parts, count_steps, count_states, like="u", per_call=True)
STATE = library.scratch(count_states, like="u")
STATES = library.scratch(lambda u: u.shape[1], count_states, like="u")
SCRATCH = {
    "rates": STATE,
    "gradient": STATE,
    "inputs": STATES,
    "outputs": STATES,
    "decays": STATES,
    "states": library.scratch(lambda u: u.shape[1] + 1, count_states, like="u"),
    "sums_of_A": library.scratch(
        lambda u: u.shape[0], lambda A: A.shape[0], count_states, like="u", per_call=True
    ),
    "sums_of_B": PARTS,
    "sums_of_C": PARTS,
    "sums_of_D": library.scratch(
        lambda u: u.shape[0], lambda grad_D: grad_D.size, like="u", per_call=True
    ),
}


def copy(source: Any, target: Any, size: Any, padded: Any, factor: Any) -> None:
    """Copy a row, times a factor, and pad it with zeros."""
    for n in range(size):
        target[n] = factor * source[n]
    for n in range(size, padded):
        target[n] = 0.0


def add_product(target: Any, n: Any, a: Any, b: Any) -> None:
    """Add the product of two vectors to the elements starting at n."""
    language.store(
        target, n, language.fma(a, b, language.load_vector(target, n, language.lanes(target)))
    )


def clear(target: Any, padded: Any) -> None:
    for n in range(padded):
        target[n] = 0.0


@library.register_kernel("examples::selective_scan", ("cpu", "foo"))
@library.tile_kernel(
    tiles=lambda u: u.shape[0] * count_parts(u),
    scratch={"rates": STATE, "state": STATE, "inputs": STATES, "outputs": STATES},
    contiguous_rows=True,
)
def forward_kernel(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, output: Any, last_state: Any,
    rates: Any, state: Any, inputs: Any, outputs: Any, tiles: Any,
) -> None:  # fmt: skip
    length, channels, parts = u.shape[1], u.shape[2], count_parts(u)
    size, padded = A.shape[1], state.shape[0]
    lanes, one = language.lanes(u), language.cast(1.0, u)
    a, h = rates.row(0), state.row(0)
    for tile in tiles:
        batch, part = tile // parts, tile % parts
        for t in range(length):
            copy(B.row(batch * length + t), inputs.row(t), size, padded, one)
            copy(C.row(batch * length + t), outputs.row(t), size, padded, one)
        for channel in range(part * channels // parts, (part + 1) * channels // parts):
            copy(A.row(channel), a, size, padded, language.cast(LOG2E, u))
            clear(h, padded)
            for t in range(length):
                step, x = delta[batch, t, channel], u[batch, t, channel]
                b, c, total = inputs.row(t), outputs.row(t), language.zero(u)
                totals = language.splat(total, lanes)
                for n in range(0, padded, lanes):
                    exponent = language.load_vector(a, n, lanes) * language.splat(step, lanes)
                    added = language.load_vector(b, n, lanes) * language.splat(step * x, lanes)
                    kept = language.load_vector(h, n, lanes) * language.exp2(exponent)
                    language.store(h, n, kept + added)
                    totals = language.fma(language.load_vector(c, n, lanes), kept + added, totals)
                total = language.reduce_add(totals)
                if D is not None:
                    total += D[channel] * x
                output[batch, t, channel] = total
            last = last_state.row(batch * channels + channel)
            for n in range(size):
                last[n] = h[n]


@library.register_kernel("examples::selective_scan_backward", ("cpu", "foo"))
@library.tile_kernel(
    tiles=lambda u: u.shape[0] * count_parts(u),
    scratch=SCRATCH,
    finish=add_up,
    contiguous_rows=True,
)
def backward_kernel(
    grad_output: Any, grad_last_state: Any, u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any,
    grad_u: Any, grad_delta: Any, grad_A: Any, grad_B: Any, grad_C: Any, grad_D: Any,
    rates: Any, gradient: Any, inputs: Any, outputs: Any, decays: Any, states: Any,
    sums_of_A: Any, sums_of_B: Any, sums_of_C: Any, sums_of_D: Any, tiles: Any,
) -> None:  # fmt: skip
    """Go back in time with g = dL/dh[t], which sums gradients through the output and h[t + 1]."""
    batches, length, channels = u.shape[0], u.shape[1], u.shape[2]
    size, padded, parts = A.shape[1], states.shape[1], sums_of_B.shape[0]
    lanes, one = language.lanes(u), language.cast(1.0, u)
    a, g = rates.row(0), gradient.row(0)
    clear(states.row(0), padded)
    for tile in tiles:
        batch, part = tile // parts, tile % parts
        first, first_sum = batch * length, (part * batches + batch) * length
        for t in range(length):
            copy(B.row(first + t), inputs.row(t), size, padded, one)
            copy(C.row(first + t), outputs.row(t), size, padded, one)
            clear(sums_of_B.row(first_sum + t), padded)
            clear(sums_of_C.row(first_sum + t), padded)
        for channel in range(part * channels // parts, (part + 1) * channels // parts):
            row = batch * channels + channel
            of_a, of_d = sums_of_A.row(row), language.zero(u)
            clear(of_a, padded)
            copy(A.row(channel), a, size, padded, language.cast(LOG2E, u))
            copy(grad_last_state.row(row), g, size, padded, one)
            for t in range(length):
                step, x = delta.row(first + t)[channel], u.row(first + t)[channel]
                b, decay = inputs.row(t), decays.row(t)
                before, h = states.row(t), states.row(t + 1)
                for n in range(0, padded, lanes):
                    exponent = language.load_vector(a, n, lanes) * language.splat(step, lanes)
                    added = language.load_vector(b, n, lanes) * language.splat(step * x, lanes)
                    kept = language.exp2(exponent)
                    language.store(decay, n, kept)
                    kept = kept * language.load_vector(before, n, lanes)
                    language.store(h, n, kept + added)
            for t in range(length - 1, -1, -1):
                step, x = delta.row(first + t)[channel], u.row(first + t)[channel]
                slope, decay = grad_output.row(first + t)[channel], decays.row(t)
                before, h = states.row(t), states.row(t + 1)
                b, of_b = inputs.row(t), sums_of_B.row(first_sum + t)
                c, of_c = outputs.row(t), sums_of_C.row(first_sum + t)
                slopes, steps = language.splat(slope, lanes), language.splat(step, lanes)
                of_u = of_delta = language.splat(language.zero(u), lanes)
                for n in range(0, padded, lanes):
                    now = language.fma(
                        language.load_vector(c, n, lanes), slopes, language.load_vector(g, n, lanes)
                    )
                    kept = now * language.load_vector(decay, n, lanes)
                    language.store(g, n, kept)
                    kept = kept * language.load_vector(before, n, lanes)
                    of_u = language.fma(now, language.load_vector(b, n, lanes), of_u)
                    of_delta = language.fma(kept, language.load_vector(a, n, lanes), of_delta)
                    add_product(of_a, n, kept, steps)
                    add_product(of_b, n, now, language.splat(step * x, lanes))
                    add_product(of_c, n, language.load_vector(h, n, lanes), slopes)
                sum_of_u = language.reduce_add(of_u)
                sum_of_delta = language.reduce_add(of_delta) * language.cast(LN2, u) + sum_of_u * x
                sum_of_u = sum_of_u * step
                if D is not None:
                    sum_of_u += D[channel] * slope
                    of_d += slope * x
                grad_u.row(first + t)[channel] = sum_of_u
                grad_delta.row(first + t)[channel] = sum_of_delta
            if D is not None:
                sums_of_D[batch, channel] = of_d


# ------------------------------------------------------------------------------------------- fake


def check(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    if not u.is_floating_point():
        raise TypeError(f"selective_scan: u must be floating-point, got {u.dtype}")
    for name, given, dimensions in (("u", u, 3), ("A", A, 2)):
        if given.dim() != dimensions:
            raise ValueError(
                f"selective_scan: {name} must have {dimensions} dimensions, got {given.dim()}"
            )
    batch, length, channels = u.shape
    size = A.shape[1]
    for name, other, shape in (
        ("delta", delta, (batch, length, channels)),
        ("A", A, (channels, size)),
        ("B", B, (batch, length, size)),
        ("C", C, (batch, length, size)),
        ("D", D, (channels,)),
    ):
        if other is not None and not library.have_sizes(other.shape, shape):
            raise ValueError(
                f"selective_scan: {name} must have shape {list(shape)} as u and A have, "
                f"got {list(other.shape)}"
            )
        if other is not None and other.dtype != u.dtype:
            raise TypeError(f"selective_scan: {name} must be {u.dtype} as u is, got {other.dtype}")


def compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@library.register_fake("examples::selective_scan")
def fake(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check(u, delta, A, B, C, D)
    last_state = u.new_empty((u.shape[0], *A.shape), dtype=compute_type(u.dtype))
    return torch.empty_like(u, memory_format=torch.contiguous_format), last_state


@library.register_fake("examples::selective_scan_backward")
def fake_backward(
    grad_output: Tensor,
    grad_last_state: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
) -> tuple[Tensor, ...]:
    check(u, delta, A, B, C, D)
    gradients = [given.new_empty(given.shape) for given in (u, delta, A, B, C)]
    return *gradients, u.new_empty(0 if D is None else D.shape)


# --------------------------------------------------------------------------------------- autograd


def composite(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the same with torch's operators, step by step, for forward mode."""
    compute = compute_type(u.dtype)
    state, outputs = u.new_zeros((u.shape[0], *A.shape), dtype=compute), []
    for t in range(u.shape[1]):
        step, x = delta[:, t, :, None].to(compute), u[:, t, :, None].to(compute)
        state = torch.exp(step * A) * state + step * x * B[:, t, None]
        outputs.append((state * C[:, t, None]).sum(-1))
    output = torch.stack(outputs, 1) if outputs else u.clone()
    return (output if D is None else output + D * u).to(u.dtype), state


library.register_autograd(
    "examples::selective_scan", "examples::selective_scan_backward", composite=composite
)


# ---------------------------------------------------------------------------------------- samples


def reference(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute each output from all inputs so far: the decay between two is exp of a difference."""
    times = delta.cumsum(1)
    between = times[:, :, None] - times[:, None]
    is_past = torch.ones(u.shape[1], u.shape[1], dtype=torch.bool).tril()
    # (batch, t, s, channel, n)
    decay = (between[..., None] * A).masked_fill(~is_past[..., None, None], -torch.inf).exp()
    inputs = (delta * u)[..., None] * B[:, :, None]
    states = torch.einsum("btsdn,bsdn->btdn", decay, inputs)
    output = torch.einsum("btdn,btn->btd", states, C)
    last = states[:, -1] if u.shape[1] else states.sum(1)
    return output if D is None else output + D * u, last


def sample(
    shape: tuple[int, int, int], size: int, dtype: torch.dtype, *, has_skip: bool = True
) -> Sample:
    batch, length, channels = shape
    states = (batch, length, size)
    u, delta, A, B, C, D = random(
        "scan", shape, shape, (channels, size), states, states, (channels,), dtype=dtype
    )
    delta, A = (0.25 * delta).abs(), -A.abs()
    return Sample((u, delta, A, B, C, D if has_skip else None))


SPEC = OpSpec(
    operator=torch.ops.examples.selective_scan.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size + 1), 4, dtype),
    sizes=(0, 1, 7, 19),
    samples={
        "no skip": lambda dtype: sample((1, 9, 11), 16, dtype, has_skip=False),
        "no state": lambda dtype: sample((1, 3, 5), 0, dtype),
    },
    essential=("size7", "no skip"),
    large=lambda dtype: sample((2, 33, 101), 16, dtype),
)
