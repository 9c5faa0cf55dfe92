"""The formats of bitsandbytes: 4 bits with a table of 16 numbers (NF4, FP4), and 8 bits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foo_ops.integrations.transformers.formats import (
    Format,
    Stored,
    UnreadableError,
    group_size_of,
    in_blocks,
    repeated,
    require,
    require_layout,
)
from foo_ops.integrations.transformers.packed import FooPackedLinear, Integers
from foo_ops.integrations.transformers.repacking import read_codes
from foo_ops.ops.arguments import compute_type

RENAMED = {
    "weight.absmax": "weight_absmax",
    "weight.quant_map": "weight_quant_map",
    "weight.nested_absmax": "weight_nested_absmax",
    "weight.nested_quant_map": "weight_nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4": "weight_quant_state_nf4",
    "weight.quant_state.bitsandbytes__fp4": "weight_quant_state_fp4",
}
"""Tensors of a file that lie below the name of a weight, and names for them beside it."""
KINDS = ("nf4", "fp4")
"""Tables of numbers of 4 bits."""


def without_dots(name: str) -> str:
    """Rename a tensor by `RENAMED`, so that a module can have it beside its weight."""
    for source, target in RENAMED.items():
        if name.endswith(f".{source}"):
            return name.removesuffix(source) + target
    return name


@dataclass(frozen=True)
class BitsAndBytes(Format):
    """The formats of ``load_in_8bit`` and ``load_in_4bit``.

    With 8 bits, ``weight`` is (N, K) int8 and ``SCB`` (N,) has the largest magnitude of each row,
    which 127 stands for.

    With 4 bits, ``weight`` has the codes of all weights, row by row, two in a byte, the first one
    in the upper bits. ``quant_map`` has the number of each code, and ``absmax`` a factor for each
    block of adjacent weights. With double quantisation, ``absmax`` has codes of
    ``nested_quant_map``, too, with factors ``nested_absmax`` for blocks of blocks, and an offset
    for all. The sizes of blocks and the offset are in a text (JSON), whose bytes are a tensor.

    Attributes:
        bits: 4 or 8.
        kind: of the table, with 4 bits.
        block: weights of a block, with 4 bits.
        storage: the dtype of the codes' tensor.
        dtype: of the weights before they were quantised, as the file's text names it.
        is_rounded: whether 4 bits become the nearest of 8, for experts.
    """

    method = "bitsandbytes"
    bits: int
    kind: str = ""
    block: int = 0
    storage: torch.dtype = torch.uint8
    dtype: str = ""
    is_rounded: bool = False

    @classmethod
    def is_in(cls, stored: Stored) -> bool:
        return "SCB" in stored or "weight_quant_map" in stored

    @classmethod
    def find(cls, stored: Stored, rows: int, columns: int, config: Any) -> Format:
        if "SCB" in stored:
            require_layout(stored, "weight", torch.int8, rows, columns)
            require_layout(stored, "SCB", None, rows)
            return cls(8)
        weight = stored["weight"]
        require(
            2 * weight.nbytes == rows * columns,
            f"weight must have {rows * columns // 2} bytes, got {weight.nbytes}",
        )
        require_layout(stored, "weight_quant_map", None, 16)
        kinds = [it for it in KINDS if f"weight_quant_state_{it}" in stored]
        require(len(kinds) == 1, "weight.quant_state is missing")
        require("weight_absmax" in stored, "weight.absmax is missing")
        blocks = stored["weight_absmax"].numel()
        size = rows * columns // blocks if blocks else 0
        require(
            size > 0 and size * blocks == rows * columns and group_size_of(size) is not None,
            f"weight.absmax must have a number for each block of 32, 64 or more weights, got "
            f"{blocks} for {rows * columns} weights",
        )
        require(
            columns % size == 0,
            f"blocks must be parts of rows, got blocks of {size} for {columns} inputs",
        )
        return cls(4, kinds[0], size, weight.dtype)

    def completed(self, stored: Stored) -> Format:
        return self if self.bits == 8 else replace(self, dtype=self.state_in(stored)["dtype"])

    def state_in(self, stored: Stored) -> Any:
        """Return the text of a file with 4 bits."""
        return json.loads(bytes(stored[f"weight_quant_state_{self.kind}"].tolist()))

    def for_experts(self) -> Format:
        return replace(self, is_rounded=self.bits == 4)

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        if self.bits == 8:
            layout = stored.get("weight_format")
            require(layout is None or not layout.any(), "weight_format must be row")
            return Integers(stored["weight"], (stored["SCB"].double() / 127).to(dtype))
        state = self.state_in(stored)
        rows, columns = state["shape"]
        require(
            rows * columns == 2 * stored["weight"].nbytes,
            f"weight.quant_state must have the shape of weight, got {state['shape']}",
        )
        absmax = largest_of_blocks(stored, state).reshape(rows, -1)
        table = stored["weight_quant_map"].float()
        codes = stored["weight"].view(torch.uint8).reshape(rows, columns // 2)
        if self.is_rounded:
            return Integers(*read_codes(codes, table, absmax, dtype))
        size: Any = group_size_of(self.block)
        wide = compute_type(dtype)
        scale = repeated(absmax.to(wide), self.block // size)
        return Integers(swapped(codes), scale, table=table.to(wide))

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        if self.bits == 8:
            return {"weight": layer.weight, "SCB": layer.scale.float() * 127}
        if self.is_rounded:
            raise UnreadableError(
                "its 4 bits have become 8, which bitsandbytes does not have; save_quantized writes "
                "them"
            )
        state = {
            "quant_type": self.kind,
            "blocksize": self.block,
            "dtype": self.dtype,
            "shape": [layer.out_features, layer.in_features],
        }
        size: Any = layer.group_size
        table: Any = layer.table
        text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        return {
            "weight": swapped(layer.weight).view(self.storage).reshape(-1, 1),
            "weight.absmax": layer.scale[:, :: self.block // size].float().flatten(),
            "weight.quant_map": table.float(),
            f"weight.quant_state.bitsandbytes__{self.kind}": text,
        }


def swapped(codes: Tensor) -> Tensor:
    """Exchange the upper and the lower bits of bytes."""

    def repack(rows: slice, written: Tensor) -> None:
        torch.bitwise_left_shift(codes[rows], 4, out=written)
        written |= codes[rows] >> 4

    rows, width = codes.shape
    found: Tensor = in_blocks(rows, width, repack, codes)
    return found


def largest_of_blocks(stored: Stored, state: Any) -> Tensor:
    """Return the factor of each block, float32."""
    absmax = stored["weight_absmax"]
    if "nested_offset" not in state:
        return absmax.float()
    factors = stored["weight_nested_absmax"].float()
    numbers = stored["weight_nested_quant_map"].float()[absmax.int()]
    of_blocks = factors.repeat_interleave(state["nested_blocksize"])[: len(numbers)]
    return numbers * of_blocks + state["nested_offset"]
