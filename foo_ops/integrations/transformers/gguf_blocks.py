"""Blocks of GGUF files, as integers that foo's kernels multiply.

A row of a quantised tensor is a sequence of blocks, of 32 or 256 weights. Functions here take all
blocks of a matrix, (N, blocks in a row, bytes), as ggml-common.h of llama.cpp defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foo_ops.integrations.transformers.packed import Integers
from foo_ops.integrations.transformers.repacking import (
    read_groups,
    read_q4_k,
    read_q5_k,
    read_q6_k,
)
from foo_ops.ops.linear_quantized import to_int8

GROUP_SIZE = 32
"""Weights that share a scale, in all layouts that are read here."""
BYTES = 2**20
"""Bytes of a file that are converted at a time, so that temporary tensors stay in the caches."""
CODES = torch.tensor(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    dtype=torch.int8,
    device="cpu",
)
"""The numbers of IQ4_NL (``kvalues_iq4nl``)."""


def integers_of(
    rows: Tensor,
    kind: str,
    dtype: torch.dtype,
    release: Callable[[Tensor], None] = lambda rows: None,
) -> Integers:
    """Convert a quantised matrix, (N, bytes in a row) uint8, as `joined_integers` does."""
    joined = joined_integers([rows[None]], [kind], dtype, release)
    return Integers(*(None if it is None else it[0] for it in joined))  # type: ignore[arg-type]


def joined_integers(
    parts: Sequence[Tensor],
    kinds: Sequence[str],
    dtype: torch.dtype,
    release: Callable[[Tensor], None] = lambda rows: None,
) -> Integers:
    """Convert quantised matrices of experts, with scales of a dtype.

    Integers are those of the file where a layout of the kernels has them, see `EXACT`. Weights of
    other kinds are rounded to the nearest of 8 bits in groups of 32, and so are all parts if one of
    them has more than 4 bits.

    Args:
        parts: (experts, N, bytes in a row) uint8, whose rows are joined in this order.
        kinds: of the parts.
        release: called with rows that have been converted.
    """
    integers = empty_integers(parts, kinds, dtype)
    last = 0
    for blocks, kind in zip(parts, kinds):
        first, last = last, last + blocks.shape[1]
        for expert, rows in enumerate(blocks):
            into = (None if it is None else it[expert, first:last] for it in integers)
            write(rows, kind, Integers(*into), release)  # type: ignore[arg-type]
    return integers


def empty_integers(parts: Sequence[Tensor], kinds: Sequence[str], dtype: torch.dtype) -> Integers:
    """Return tensors for the rows of all parts, whose zeros are written for `SYMMETRIC` kinds."""
    weights, size = block_of(kinds[0])
    columns = parts[0].shape[2] // size * weights
    sizes = len(parts[0]), sum(it.shape[1] for it in parts)
    scale = parts[0].new_empty((*sizes, columns // GROUP_SIZE), dtype=dtype)
    if not all(it in FOUR_BITS for it in kinds):
        return Integers(scale.new_empty((*sizes, columns), dtype=torch.int8), scale)
    weight = scale.new_empty((*sizes, columns // 2), dtype=torch.uint8)
    if not any(it in SYMMETRIC for it in kinds):
        return Integers(weight, scale, torch.empty_like(scale))
    # One row of zeros serves all rows.
    own = scale[:1, :1] if all(it in SYMMETRIC for it in kinds) else scale
    return Integers(weight, scale, torch.full_like(own, ZERO).expand_as(scale))


def write(rows: Tensor, kind: str, integers: Integers, release: Callable[[Tensor], None]) -> None:
    """Write integers and scales of a matrix, and zeros if its kind has them."""
    weight, scale, zero, *_ = integers
    tensors = [weight, scale]
    if zero is not None and kind not in SYMMETRIC:
        tensors.append(zero)
    is_wider = zero is None and kind in FOUR_BITS
    step = max(1, BYTES // rows.shape[1])
    for some, *into in zip(rows.split(step), *(it.split(step) for it in tensors)):
        if kind in WRITERS and not is_wider:
            WRITERS[kind](some.unflatten(1, (-1, block_of(kind)[1])), *into)
        else:
            write_nearest(some, kind, *into)
        release(some)


def block_of(kind: str) -> tuple[int, int]:
    """Return the weights and the bytes of a block."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return weights, size


def row_bytes(kind: str, columns: int) -> int:
    """Return the bytes of a matrix's row."""
    weights, size = block_of(kind)
    return columns // weights * size


def halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a byte of each block, (N, blocks), in float32."""
    return blocks[..., start : start + 2].view(torch.float16).squeeze(-1).float()


# ------------------------------------------------------------------------------------------ layouts


# Each writes the integers and the scales of some rows, and zeros if their kind has them.


def write_q4_1(blocks: Tensor, integers: Tensor, scale: Tensor, zero: Tensor) -> None:
    """integer * scale + minimum."""
    groups, minimum = integers.unflatten(1, (-1, GROUP_SIZE // 2)), -halves(blocks, 2)
    groups.copy_(blocks[..., 4:])
    scale.copy_(halves(blocks, 0))
    torch.div(minimum, scale, out=zero)
    # Equal weights have no scale, and one that dtype cannot divide by is far below the minimum.
    is_flat = zero.isfinite().logical_not_()
    if is_flat.any():
        scale[is_flat] = minimum.masked_fill(minimum == 0, 1).to(scale.dtype)[is_flat]
        zero[is_flat] = (minimum != 0).to(zero.dtype)[is_flat]
        groups[is_flat] = 0


def write_q5_0(blocks: Tensor, integers: Tensor, scale: Tensor) -> None:
    """(integer - 16) * scale, with the fifth bits of 32 integers in a word."""
    fifth = blocks[..., 2:6, None] >> torch.arange(8, device=blocks.device) & 1
    found = elements(blocks[..., 6:]) | fifth.flatten(-2) << 4
    torch.sub(found.to(torch.int8), 16, out=integers.unflatten(1, (-1, GROUP_SIZE)))
    scale.copy_(halves(blocks, 0))


def write_iq4_nl(blocks: Tensor, integers: Tensor, scale: Tensor) -> None:
    """number * scale, with codes for 16 numbers."""
    numbers = CODES.to(blocks.device)[elements(blocks[..., 2:]).long()]
    integers.copy_(numbers.flatten(1))
    scale.copy_(halves(blocks, 0))


def elements(bytes: Tensor) -> Tensor:
    """Return the 4-bit integers of bytes, those of the lower bits first."""
    return torch.cat((bytes & 15, bytes >> 4), -1)


EXACT: dict[str, Callable[..., None]] = {
    "Q4_0": read_groups,
    "Q4_1": write_q4_1,
    "Q4_K": read_q4_k,
    "Q5_0": write_q5_0,
    "Q8_0": read_groups,
    "IQ4_NL": write_iq4_nl,
}
"""Kinds whose integers stay as they are. Scales, and minima over scales, are rounded to a dtype."""
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
"""Kinds with integers of 4 bits; others have 8."""
SYMMETRIC = ("Q4_0",)
"""Kinds with integers of 4 bits and `ZERO` for all groups: weights are (integer - 8) * scale."""
ZERO = 8
WRITERS: dict[str, Callable[..., None]] = {**EXACT, "Q5_K": read_q5_k, "Q6_K": read_q6_k}
"""Kinds with functions of their own; those of 5 and 6 bits round to the nearest of 8 bits."""


def write_nearest(rows: Tensor, kind: str, integers: Tensor, scale: Tensor) -> None:
    """Round to integers of 8 bits, in groups of 32."""
    from gguf import GGMLQuantizationType, dequantize

    numbers = torch.from_numpy(dequantize(rows.cpu().numpy(), GGMLQuantizationType[kind]))
    for tensor, found in zip((integers, scale), to_int8(numbers.double(), scale.dtype, GROUP_SIZE)):
        tensor.copy_(found)
