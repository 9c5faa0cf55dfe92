"""The selective scan of Mamba (Gu and Dao 2023, algorithm 2), for one pass over a sequence.

    h[t, d, n] = exp(delta[t, d] * A[d, n]) * h[t - 1, d, n] + delta[t, d] * B[t, n] * u[t, d]
    output[t, d] = sum_n C[t, n] * h[t, d, n] + D[d] * u[t, d]

Shows a recurrence: tiles are what is independent (a channel of a sequence), the state lies in a
result, and the backward pass computes the states again instead of keeping them all.
"""

from __future__ import annotations

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


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output (batch, T, channels) and the last state (batch, channels, N).

    ``u`` and ``delta`` are (batch, T, channels), ``A`` (channels, N), ``B`` and ``C`` (batch, T, N)
    and ``D`` (channels,), all of one dtype. The state is float32 for half precision.
    """
    return torch.ops.examples.selective_scan(u, delta, A, B, C, D)


# ---------------------------------------------------------------------------------------- kernels


@library.register_kernel("examples::selective_scan", ("cpu", "foo"))
@library.tile_kernel(tiles=lambda last_state: last_state.rows, contiguous_rows=True)
def forward_kernel(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, output: Any, last_state: Any, tiles: Any
) -> None:
    length, channels, size = u.shape[1], u.shape[2], A.shape[1]
    for tile in tiles:
        batch, channel = tile // channels, tile % channels
        a, h = A.row(channel), last_state.row(tile)
        for n in range(size):
            h[n] = 0.0
        for t in range(batch * length, (batch + 1) * length):
            step, x = delta.row(t)[channel], u.row(t)[channel]
            b, c, total = B.row(t), C.row(t), language.zero(u)
            for n in range(size):
                h[n] = language.exp(step * a[n]) * h[n] + step * x * b[n]
            for n in range(size):
                total = language.accumulate(total, c[n] * h[n])
            if D is not None:
                total += D[channel] * x
            output.row(t)[channel] = total


def add_parts(sums: Any, parts: Any, rows: Any, target: Any) -> None:
    """Add up blocks of so many rows, and write the sum to as many rows of the target."""
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
    return A.shape[1]


# A part of the channels of each sequence has its own sums for B and C; each sequence its own for A
# and D. A thread has the states of one sequence: that which g lies in, and those before each step.
PARTS = library.scratch(count_parts, count_steps, count_states, like="u", per_call=True)
SCRATCH = {
    "states": library.scratch(lambda u: u.shape[1] + 2, count_states, like="u"),
    "sums_of_A": library.scratch(
        lambda u: u.shape[0], lambda A: A.shape[0], count_states, like="u", per_call=True
    ),
    "sums_of_B": PARTS,
    "sums_of_C": PARTS,
    "sums_of_D": library.scratch(
        lambda u: u.shape[0], lambda grad_D: grad_D.size, like="u", per_call=True
    ),
}


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
    states: Any, sums_of_A: Any, sums_of_B: Any, sums_of_C: Any, sums_of_D: Any, tiles: Any,
) -> None:  # fmt: skip
    """Go back through time with g = dL/dh[t]: what h[t] adds to the output, and to h[t + 1]."""
    batches, length, channels = u.shape[0], u.shape[1], u.shape[2]
    size, parts = A.shape[1], sums_of_B.shape[0]
    for tile in tiles:
        batch, part = tile // parts, tile % parts
        g, first = states.row(0), batch * length
        for t in range(length):
            of_b = sums_of_B.row(part * batches * length + first + t)
            of_c = sums_of_C.row(part * batches * length + first + t)
            for n in range(size):
                of_b[n] = 0.0
                of_c[n] = 0.0
        for channel in range(part * channels // parts, (part + 1) * channels // parts):
            a, of_a = A.row(channel), sums_of_A.row(batch * channels + channel)
            last, before = (
                grad_last_state.row(batch * channels + channel),
                states.row(1),
            )
            for n in range(size):
                before[n] = 0.0
                of_a[n] = 0.0
                g[n] = last[n]
            for t in range(length):
                step, x = delta.row(first + t)[channel], u.row(first + t)[channel]
                b, h = B.row(first + t), states.row(t + 2)
                before = states.row(t + 1)
                for n in range(size):
                    h[n] = language.exp(step * a[n]) * before[n] + step * x * b[n]
            of_d = language.zero(u)
            for t in range(length - 1, -1, -1):
                row = first + t
                step, x, grad = delta.row(row)[channel], u.row(row)[channel], grad_output.row(row)
                b, c, slope = B.row(row), C.row(row), grad[channel]
                h, before = states.row(t + 2), states.row(t + 1)
                of_b = sums_of_B.row(part * batches * length + row)
                of_c = sums_of_C.row(part * batches * length + row)
                of_u, of_delta = language.zero(u), language.zero(u)
                for n in range(size):
                    g[n] = g[n] + slope * c[n]
                    of_c[n] = of_c[n] + slope * h[n]
                    of_b[n] = of_b[n] + g[n] * step * x
                for n in range(size):
                    decay = language.exp(step * a[n])
                    kept = g[n] * decay * before[n]
                    of_u = language.accumulate(of_u, g[n] * b[n])
                    of_delta = language.accumulate(of_delta, kept * a[n] + g[n] * b[n] * x)
                    of_a[n] = of_a[n] + kept * step
                    g[n] = g[n] * decay
                of_u = of_u * step
                if D is not None:
                    of_u += D[channel] * slope
                    of_d += slope * x
                grad_u.row(row)[channel] = of_u
                grad_delta.row(row)[channel] = of_delta
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
        if other is not None and other.shape != shape:
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
    """Take each output from all inputs before it: the decay between two is exp of a difference."""
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
