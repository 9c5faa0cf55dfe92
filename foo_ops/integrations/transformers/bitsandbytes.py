"""The formats of bitsandbytes: 4 bits with a table of 16 numbers (NF4, FP4), and 8 bits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foo_ops.integrations.transformers.formats import (
    Format,
    Stored,
    UnreadableError,
    require,
    require_layout,
)
from foo_ops.integrations.transformers.packed import FooPackedLinear, Integers
from foo_ops.integrations.transformers.repacking import read_codes

GROUP_SIZE = 32
"""Weights that share a scale once they have 8 bits."""
RENAMED = {
    "weight.absmax": "weight_absmax",
    "weight.quant_map": "weight_quant_map",
    "weight.nested_absmax": "weight_nested_absmax",
    "weight.nested_quant_map": "weight_nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4": "weight_quant_state",
    "weight.quant_state.bitsandbytes__fp4": "weight_quant_state",
}
"""Tensors of a file that lie below the name of a weight, and names for them beside it."""


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
    for all. The sizes of blocks and the offset are in a text (JSON), whose bytes are a tensor. No
    kernel multiplies by a table: weights become the nearest of 8 bits.

    Attributes:
        bits: 4 or 8.
    """

    method = "bitsandbytes"
    bits: int

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
        require("weight_quant_state" in stored, "weight.quant_state is missing")
        require("weight_absmax" in stored, "weight.absmax is missing")
        blocks = stored["weight_absmax"].numel()
        size = rows * columns // blocks if blocks else 0
        require(
            size > 0 and size * blocks == rows * columns and size % GROUP_SIZE == 0,
            f"weight.absmax must have a number for each block of 32, 64 or more weights, got "
            f"{blocks} for {rows * columns} weights",
        )
        require(
            columns % size == 0,
            f"blocks must be parts of rows, got blocks of {size} for {columns} inputs",
        )
        return cls(4)

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        if self.bits == 8:
            layout = stored.get("weight_format")
            require(layout is None or not layout.any(), "weight_format must be row")
            return Integers(stored["weight"], (stored["SCB"].double() / 127).to(dtype))
        state = json.loads(bytes(stored["weight_quant_state"].tolist()))
        rows, columns = state["shape"]
        require(
            rows * columns == 2 * stored["weight"].nbytes,
            f"weight.quant_state must have the shape of weight, got {state['shape']}",
        )
        absmax = largest_of_blocks(stored, state).reshape(rows, -1)
        table = stored["weight_quant_map"].float()
        codes = stored["weight"].view(torch.uint8).reshape(rows, columns // 2)
        return Integers(*read_codes(codes, table, absmax, dtype))

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        if self.bits == 4:
            raise UnreadableError(
                "its 4 bits have become 8, which bitsandbytes does not have; save_quantized writes "
                "them"
            )
        return {"weight": layer.weight, "SCB": layer.scale.float() * 127}


def largest_of_blocks(stored: Stored, state: Any) -> Tensor:
    """Return the factor of each block, float32."""
    absmax = stored["weight_absmax"]
    if "nested_offset" not in state:
        return absmax.float()
    factors = stored["weight_nested_absmax"].float()
    numbers = stored["weight_nested_quant_map"].float()[absmax.int()]
    of_blocks = factors.repeat_interleave(state["nested_blocksize"])[: len(numbers)]
    return numbers * of_blocks + state["nested_offset"]
