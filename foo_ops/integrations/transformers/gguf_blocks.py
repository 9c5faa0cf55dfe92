"""Blocks of GGUF files, as integers that foo's kernels multiply.

A row of a quantised tensor is a sequence of blocks, of 32 or 256 weights. Functions here take all
blocks of a matrix, (N, blocks in a row, bytes), as ggml-common.h of llama.cpp defines them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foo_ops.integrations.transformers.packed import Integers
from foo_ops.integrations.transformers.repacking import read_q4_k, read_rounded
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
    """Convert a quantised matrix, (N, bytes in a row) uint8, with scales of a dtype.

    Integers are those of the file where a layout of the kernels has them, see `EXACT`. Weights of
    other kinds are rounded to the nearest of 8 bits in groups of 32.

    Args:
        release: called with rows that have been converted.
    """
    read, size = EXACT.get(kind) or ROUNDED.get(kind), block_of(kind)[1]
    whole: list[Tensor] = []
    step = max(1, BYTES // rows.shape[1])
    for some in rows.split(step):
        found = read(some.unflatten(1, (-1, size)), dtype) if read else nearest(some, kind, dtype)
        part = [it for it in found if it is not None]
        if not whole:
            whole = [it.new_empty((len(rows), *it.shape[1:])) for it in part]
            places = zip(*(it.split(step) for it in whole))
        for tensor, numbers in zip(next(places), part):
            tensor.copy_(numbers)
        release(some)
    integers = Integers(*(it.flatten(1) for it in whole))
    if kind in ZEROS:
        # One row of zeros serves all rows.
        zero = torch.full_like(integers.scale[:1], ZEROS[kind]).expand_as(integers.scale)
        return integers._replace(zero=zero)
    return integers


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


# Integers may be (N, blocks, bytes), so that those of a file are copied once.


def q4_0(blocks: Tensor, dtype: torch.dtype) -> Integers:
    """(integer - 8) * scale; the integers lie as in foo's groups of 32."""
    return Integers(blocks[..., 2:], halves(blocks, 0).to(dtype))


def q4_1(blocks: Tensor, dtype: torch.dtype) -> Integers:
    """integer * scale + minimum."""
    return with_minimum(blocks[..., 4:].contiguous(), halves(blocks, 0), -halves(blocks, 2), dtype)


def q4_k(blocks: Tensor, dtype: torch.dtype) -> Integers:
    """integer * scale - minimum, with 8 groups in a block."""
    return Integers(*read_q4_k(blocks, dtype))


def q5_k(blocks: Tensor, dtype: torch.dtype) -> Integers:
    return Integers(*read_rounded("q5_k", blocks, dtype))


def q6_k(blocks: Tensor, dtype: torch.dtype) -> Integers:
    return Integers(*read_rounded("q6_k", blocks, dtype))


def with_minimum(groups: Tensor, scale: Tensor, minimum: Tensor, dtype: torch.dtype) -> Integers:
    """Return integers whose weights are integer * scale - minimum.

    Args:
        groups: (N, groups, 16) uint8, packed; may be written to.
        scale, minimum: (N, groups).
    """
    scale = scale.to(dtype)
    zero = (minimum / scale).to(dtype)
    # Equal weights have no scale, and one that dtype cannot divide by is far below the minimum.
    is_flat = zero.isfinite().logical_not_()
    if is_flat.any():
        scale = torch.where(is_flat, minimum.masked_fill(minimum == 0, 1).to(dtype), scale)
        zero = torch.where(is_flat, (minimum != 0).to(dtype), zero)
        groups[is_flat] = 0
    return Integers(groups.flatten(1), scale, zero)


def q8_0(blocks: Tensor, dtype: torch.dtype) -> Integers:
    """integer * scale."""
    return Integers(blocks[..., 2:].view(torch.int8), halves(blocks, 0).to(dtype))


def q5_0(blocks: Tensor, dtype: torch.dtype) -> Integers:
    """(integer - 16) * scale, with the fifth bits of 32 integers in a word."""
    fifth = blocks[..., 2:6, None] >> torch.arange(8, device=blocks.device) & 1
    integers = elements(blocks[..., 6:]) | fifth.flatten(-2) << 4
    return Integers((integers.to(torch.int8) - 16).flatten(1), halves(blocks, 0).to(dtype))


def iq4_nl(blocks: Tensor, dtype: torch.dtype) -> Integers:
    """number * scale, with codes for 16 numbers."""
    numbers = CODES.to(blocks.device)[elements(blocks[..., 2:]).long()]
    return Integers(numbers.flatten(1), halves(blocks, 0).to(dtype))


def elements(bytes: Tensor) -> Tensor:
    """Return the 4-bit integers of bytes, those of the lower bits first."""
    return torch.cat((bytes & 15, bytes >> 4), -1)


EXACT: dict[str, Callable[[Tensor, torch.dtype], Integers]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q4_K": q4_k,
    "Q5_0": q5_0,
    "Q8_0": q8_0,
    "IQ4_NL": iq4_nl,
}
"""Kinds whose integers stay as they are. Scales, and minima over scales, are rounded to a dtype."""
ZEROS = {"Q4_0": 8}
"""Kinds with the same zero for all groups."""
ROUNDED: dict[str, Callable[[Tensor, torch.dtype], Integers]] = {"Q5_K": q5_k, "Q6_K": q6_k}
"""Kinds with kernels that round to the nearest of 8 bits."""


def nearest(rows: Tensor, kind: str, dtype: torch.dtype) -> Integers:
    """Round to integers of 8 bits, in groups of 32."""
    from gguf import GGMLQuantizationType, dequantize

    numbers = torch.from_numpy(dequantize(rows.cpu().numpy(), GGMLQuantizationType[kind]))
    return Integers(*(it.to(rows.device) for it in to_int8(numbers.double(), dtype, GROUP_SIZE)))
