"""Compares linear layers with weights of 8 and 4 bits with torch's, and with unquantized ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foo_ops
from benchmarks import peaks
from benchmarks.measure import OURS, Case, Contenders, Local
from foo_ops.ops.dequantize import numbers_of_table4

SECTION, FEW_ROWS = "quantized linear", "quantized linear of one row"
SECTIONS = (SECTION, FEW_ROWS)
UNQUANTIZED = "F.linear"
TORCHAO = "torchao"
PEERS = ("torch", TORCHAO, UNQUANTIZED)
DTYPES = ("float32", "bfloat16")
KINDS: tuple[tuple[int, int | None], ...] = ((8, None), (8, 32), (4, 32), (4, 128))
"""Bits, and group sizes."""
ROUNDED_KINDS: tuple[tuple[int, int | None], ...] = ((8, None), (4, 128))
"""The same of layers that round their rows to 8 bits."""
TABLE_KIND = 4, 64
"""The same of codes of a table: bitsandbytes' blocks."""
ROWS = (64, 1024)
READ_TARGET, TARGET = 0.70, 0.60
"""Target fractions: of the read bandwidth for one row, of the float32 peak for more."""

Weights = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """A layer with weights of 8 bits, or of 8 or 4 bits in groups, and its number of input rows.

    With ``activations``, rows are rounded to that many bits, and many rows of groups by section, as
    `apply` does. With a table, weights of 4 bits are codes of its numbers, as in NF4.
    """

    dtype: str
    rows: int
    width: int
    outputs: int
    bits: int
    group_size: int | None
    activations: int | None = None
    has_table: bool = False

    @property
    def name(self) -> str:
        kind = "codes of a table" if self.has_table else f"int{self.bits}"
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        rows = "" if self.activations is None else f", rows of {self.activations} bits"
        sizes = f"{self.rows} x {self.width} x {self.outputs}"
        return f"{kind}{groups}{rows}, {self.dtype}, {sizes}"

    @property
    def rounding(self) -> dict[str, Any]:
        from foo_ops.integrations.transformers.quantized import MANY_ROWS

        has_groups, is_rounded = self.group_size is not None, self.activations is not None
        by_section = has_groups and is_rounded and self.rows >= MANY_ROWS
        return {"activations": self.activations, "by_section": by_section}

    @property
    def target(self) -> float:
        return READ_TARGET if self.rows == 1 else TARGET

    def flops(self) -> int:
        return 2 * self.rows * self.width * self.outputs

    def weight_bytes(self) -> int:
        """Count the bytes of integers, scales and zeros."""
        size = 4 if self.has_table else getattr(torch, self.dtype).itemsize
        groups = self.width // (self.group_size or self.width)
        per_group = size if self.bits == 8 or self.has_table else 2 * size
        return self.outputs * (self.width * self.bits // 8 + per_group * groups)


def layers(dtypes: Sequence[str]) -> Iterator[Layer]:
    for kind in KINDS:
        for dtype in (it for it in DTYPES if it in dtypes):
            yield Layer(dtype, 1, 4096, 4096, *kind)
            for rows in ROWS:
                yield Layer(dtype, rows, 2816, 1024, *kind)
    for dtype in (it for it in DTYPES if it in dtypes):
        yield Layer(dtype, 1, 4096, 4096, *TABLE_KIND, has_table=True)
        for rows in ROWS:
            yield Layer(dtype, rows, 2816, 1024, *TABLE_KIND, has_table=True)
    for kind in ROUNDED_KINDS if "bfloat16" in dtypes else ():
        yield Layer("bfloat16", 1, 4096, 4096, *kind, activations=8)
        for rows in (16, *ROWS):
            yield Layer("bfloat16", rows, 2816, 1024, *kind, activations=8)


def target(name: str) -> float:
    """Return the target of a row by its name."""
    return next(it.target for it in layers(DTYPES) if it.name == name)


def cases(dtypes: Sequence[str], threads: Sequence[int]) -> Iterator[Case]:
    for layer in layers(dtypes):
        is_read = layer.rows == 1
        yield Case(
            FEW_ROWS if is_read else SECTION,
            layer.name,
            partial(contenders, layer),
            tuple(threads),
            layer.weight_bytes() if is_read else layer.flops(),
            references=peaks.references(peaks.READ if is_read else peaks.FMA),
            headline=layer.dtype == "bfloat16",
        )


def contenders(layer: Layer) -> Contenders:
    dtype = getattr(torch, layer.dtype)
    input = torch.randn(layer.rows, layer.width).to(dtype)
    weight = (torch.randn(layer.outputs, layer.width) / layer.width**0.5).to(dtype)
    quantized = foo_ops.quantize_weight(weight, layer.bits, layer.group_size)
    dense = foo_ops.dequantize_weight(*quantized)
    ways: dict[str, tuple[Callable[..., Tensor], Weights]]
    if layer.has_table:
        codes, scale, _ = quantized
        of_table = codes, scale.float(), torch.linspace(-1, 1, 16)
        ways = {OURS: (foo_ops.linear_table4, of_table)}
        dense = numbers_of_table4(*of_table, weight.dtype)
    elif layer.bits == 4:
        ours = partial(
            foo_ops.linear_int4,
            group_size=layer.group_size,  # type: ignore[arg-type]
            **layer.rounding,
        )
        ways = {OURS: (ours, quantized), "torch": (torch_int4, pack_for_torch(*quantized))}
    else:
        ways = {OURS: (partial(foo_ops.linear_int8, **layer.rounding), quantized)}
        if layer.group_size is None:
            ways["torch"] = torch.ops.aten._weight_int8pack_mm.default, quantized
    ways[UNQUANTIZED] = F.linear, (dense,)
    least = peaks.bytes_beyond_the_caches() if layer.rows == 1 else 0
    makers: dict[str, Callable[[], Local]] = {
        name: partial(forward, *way, input, least) for name, way in ways.items()
    }
    if (layer.bits, layer.group_size) == (8, None):
        # With 4 bits torchao calls torch's own kernel, which is already a peer.
        makers[TORCHAO] = lambda: forward(F.linear, (int8_by_torchao(dense),), input, least)
    return makers


def forward(function: Callable[..., Tensor], weights: Weights, input: Tensor, least: int) -> Local:
    """Alternate between copies of the weights, ``least`` bytes in all, like layers of a model."""
    copies = -(-least // sum(map(bytes_of, weights)))
    following = itertools.cycle([weights, *(clones(weights) for _ in range(copies - 1))])
    return Local(lambda: function(input, *next(following)), torch.no_grad)


def bytes_of(weight: Tensor) -> int:
    """Count a weight's bytes; a tensor subclass lists the names of its parts."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    names, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, name).nbytes for name in names)


def clones(weights: Weights) -> Weights:
    return tuple(it.clone() for it in weights)


# ------------------------------------------------------------------------------------ torch's own


def torch_int4(input: Tensor, packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
    group_size = input.shape[-1] // scales_and_zeros.shape[0]
    return torch.ops.aten._weight_int4pack_mm_for_cpu.default(
        input, packed, group_size, scales_and_zeros
    )


def pack_for_torch(weight: Tensor, scale: Tensor, zero: Tensor) -> Weights:
    """Convert for torch, which computes (integer - 8) * scale + zero, with another zero."""
    groups = weight.unflatten(1, (scale.shape[1], -1))
    integers = torch.cat((groups & 15, groups >> 4), 2).flatten(1).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(integers, 1)
    return packed, torch.stack((scale, (8 - zero) * scale), 2).transpose(0, 1).contiguous()


# ---------------------------------------------------------------------------------------- torchao


def int8_by_torchao(dense: Tensor) -> Tensor:
    """Quantize a weight as torchao's users do; raises ModuleNotFoundError without torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    outputs, width = dense.shape
    layer = nn.Linear(width, outputs, bias=False, dtype=dense.dtype)
    layer.weight = nn.Parameter(dense, requires_grad=False)
    quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
    return layer.weight.detach()
