"""Blocks of GGUF files, as integers that foo's kernels multiply.

A row of a quantised tensor is a sequence of blocks, of 32 or 256 weights. Functions here take all
blocks of a matrix, (N, blocks in a row, bytes), as ggml-common.h of llama.cpp defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foo_ops.integrations.transformers.packed import Integers
from foo_ops.integrations.transformers.repacking import (
    pair_codes,
    read_groups,
    read_q4_k,
    read_q5_k,
    read_q6_k,
)
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.linear_quantized import to_int8

GROUP_SIZE = 32
"""Weights that share a scale, in all layouts that are read here."""
BYTES = 2**20
"""Bytes of a file that are converted at a time, so that temporary tensors stay in the caches."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Numbers of codes of 4 bits (``kvalues_iq4nl``, and ``kvalues_mxfp4``, which are doubled)."""


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
    for part, rows, into in placed(parts, integers):
        write(rows, kinds[part], Integers(*into), release)  # type: ignore[arg-type]
    return integers


def placed(
    parts: Sequence[Tensor], tensors: Sequence[Tensor | None]
) -> Iterator[tuple[int, Tensor, list[Tensor | None]]]:
    """Yield a part's number, the rows that an expert has there, and their places in tensors."""
    last = 0
    for part, blocks in enumerate(parts):
        first, last = last, last + blocks.shape[1]
        for expert, rows in enumerate(blocks):
            yield part, rows, [None if it is None else it[expert, first:last] for it in tensors]


def joined_mxfp4(
    parts: Sequence[Tensor], release: Callable[[Tensor], None] = lambda rows: None
) -> tuple[Tensor, Tensor]:
    """Return codes and exponents of experts as `foo_ops.moe_experts_quantized` takes MXFP4.

    Args:
        parts, release: as for `joined_integers`.
    """
    sizes, groups = (
        (len(parts[0]), sum(it.shape[1] for it in parts)),
        parts[0].shape[2] // block_of("MXFP4")[1],
    )
    codes = parts[0].new_empty((*sizes, groups * GROUP_SIZE // 2))
    exponents = parts[0].new_empty((*sizes, groups))
    for _, rows, into in placed(parts, (codes, exponents)):
        for some, blocks, *places in chunks(rows, "MXFP4", *into):  # type: ignore[arg-type]
            pair_codes(blocks, TABLES["MXFP4"].start, places[0])
            places[1].copy_(blocks[..., 0])
            release(some)
    return codes, exponents


def codes_of(
    rows: Tensor,
    kind: str,
    dtype: torch.dtype,
    release: Callable[[Tensor], None] = lambda rows: None,
) -> Integers:
    """Convert a matrix of a kind of `TABLES`, whose scales stay exact, for inputs of a dtype."""
    table, (weights, size) = TABLES[kind], block_of(kind)
    columns, wide = rows.shape[1] // size * weights, compute_type(dtype)
    codes = rows.new_empty((len(rows), columns // 2))
    scale = rows.new_empty((len(rows), columns // GROUP_SIZE), dtype=wide)
    for some, blocks, *into in chunks(rows, kind, codes, scale):
        table.write_codes(blocks, *into)
        release(some)
    return Integers(codes, scale, table=scale.new_tensor(table.numbers))


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
    for some, blocks, *into in chunks(rows, kind, *tensors):
        if kind in WRITERS and not is_wider:
            WRITERS[kind](blocks, *into)
        else:
            write_nearest(some, kind, *into)
        release(some)


def chunks(rows: Tensor, kind: str, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield some rows at a time: bytes, blocks, and rows of the tensors."""
    step = max(1, BYTES // rows.shape[1])
    for some, *others in zip(rows.split(step), *(it.split(step) for it in tensors)):
        yield some, some.unflatten(1, (-1, block_of(kind)[1])), *others


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


def scales_of_iq4_xs(blocks: Tensor) -> Tensor:
    """Return a factor times (an integer of 6 bits - 32), whose upper bits lie in two bytes."""
    shifts = torch.arange(0, 8, 2, device=blocks.device)
    upper = (blocks[..., 2:4, None] >> shifts & 3).flatten(-2)
    lower = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    integers = (lower | upper << 4).float() - 32
    return (halves(blocks, 0).unsqueeze(-1) * integers).flatten(1)


def scales_of_mxfp4(blocks: Tensor) -> Tensor:
    """Return powers of 2: half of the scale, for doubled numbers."""
    return torch.exp2(blocks[..., 0].float() - 128)


class Table(NamedTuple):
    """A kind with codes of 4 bits for 16 numbers.

    Attributes:
        numbers: of the codes, in units of a scale.
        start: the first byte of a block that has codes.
        scales: returns those of blocks, (N, groups) float32, without rounding.
    """

    numbers: tuple[int, ...]
    start: int
    scales: Callable[[Tensor], Tensor]

    def write(self, blocks: Tensor, integers: Tensor, scale: Tensor) -> None:
        """Write numbers as integers of 8 bits."""
        codes = elements(blocks[..., self.start :].unflatten(-1, (-1, GROUP_SIZE // 2)))
        numbers = torch.tensor(self.numbers, dtype=torch.int8, device=blocks.device)
        integers.copy_(numbers[codes.long()].flatten(1))
        scale.copy_(self.scales(blocks))

    def write_codes(self, blocks: Tensor, codes: Tensor, scale: Tensor) -> None:
        pair_codes(blocks, self.start, codes)
        scale.copy_(self.scales(blocks))


def elements(bytes: Tensor) -> Tensor:
    """Return the 4-bit integers of bytes, those of the lower bits first."""
    return torch.cat((bytes & 15, bytes >> 4), -1)


TABLES = {
    "IQ4_NL": Table(IQ4, 2, lambda blocks: halves(blocks, 0)),
    "IQ4_XS": Table(IQ4, 8, scales_of_iq4_xs),
    "MXFP4": Table(E2M1, 1, scales_of_mxfp4),
}
EXACT: dict[str, Callable[..., None]] = {
    "Q4_0": read_groups,
    "Q4_1": write_q4_1,
    "Q4_K": read_q4_k,
    "Q5_0": write_q5_0,
    "Q8_0": read_groups,
    **{kind: table.write for kind, table in TABLES.items()},
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
