"""torchao's formats of 4 and 8 bits in safetensors files, without torchao."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import is_torchao_available
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from foo_ops.integrations.transformers.formats import (
    Format,
    Stored,
    UnreadableError,
    group_size_of,
    grouped,
    grouped_bytes,
    require,
    require_layout,
    words_of,
)
from foo_ops.integrations.transformers.packed import FooPackedLinear, Integers
from foo_ops.library.operators import dtype_name
from foo_ops.ops.arguments import compute_type

SIGNS = 0x88
"""Added to two signed integers of 4 bits in a byte, without a carry, it makes them unsigned."""
PAIRS, BYTES, FLOATS = "pairs", "bytes", "floats"
READ = (
    "Int4WeightOnlyConfig",
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
)
"""torchao's configurations whose weights are read, if they are packed as one of `PACKINGS`."""
PACKINGS = ("plain", "unpacked_to_int8")


class StoredTorchAo(QuantizationConfigMixin):
    """A quantization configuration as it is in the file, where transformers' own needs torchao."""

    def __init__(self, **settings: Any) -> None:
        self.quant_method = QuantizationMethod.TORCHAO
        self.settings = {"quant_method": self.quant_method.value} | settings

    @staticmethod
    def is_for(settings: dict[str, Any]) -> bool:
        """Whether our layers may have the weights of a file: without torchao, nothing else can."""
        kinds = settings.get("quant_type")
        kind = kinds.get("default") if isinstance(kinds, dict) else None
        return not is_torchao_available() or (isinstance(kind, dict) and is_read(kind))

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.settings)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


def is_read(kind: dict[str, Any]) -> bool:
    """Whether our layers have the weights of a configuration of torchao.

    Up to version 1 of a configuration, they are pickled.
    """
    settings = kind.get("_data", {})
    packings = [it for name, it in settings.items() if name.endswith("packing_format")]
    names = [it["_data"] if isinstance(it, dict) else it for it in packings]
    return (
        kind.get("_version", 1) > 1
        and kind.get("_type") in READ
        and all(str(it).lower() in PACKINGS for it in names)
    )


@dataclass(frozen=True)
class TorchAo(Format):
    """The weights of torchao's ``Int4Tensor``, ``Int8Tensor``, ``IntxUnpackedToInt8Tensor`` and
    ``Float8Tensor``.

    ``_weight_qdata`` is (N, K / 2) with two signed integers of 4 bits in a byte, the first one
    lowest, and then ``_weight_scale`` and ``_weight_zero_point`` are (G, N), floating: a weight is
    integer * scale + zero. Or it is (N, K) int8 or float8_e4m3fn, with scales (N, G), (N, 1) or
    (1, 1): a weight is (integer - zero) * scale, with zeros of scale's shape or none. If all of
    these integers have 4 bits, so do ours; then zeros are taken, too.

    Attributes:
        kind: PAIRS, BYTES or FLOATS.
        group_size: of the file.
    """

    method = "torchao"
    kind: str
    group_size: int

    @classmethod
    def require_files(cls, files: Sequence[str]) -> None:
        for file in files:
            require(
                str(file).endswith(".safetensors"),
                f"{os.path.basename(file)} is a pickle of torchao's classes, which torchao alone "
                "reads",
            )

    @classmethod
    def is_in(cls, stored: Stored) -> bool:
        return any(name.endswith("_qdata") for name in stored)

    @classmethod
    def find(cls, stored: Stored, rows: int, columns: int, config: Any) -> Format:
        require("_weight_act_pre_scale" not in stored, "it must have no act_pre_scale")
        require(
            "_weight_scale_and_zero" not in stored,
            "its int4_packing_format must be plain, got tile_packed_to_4d",
        )
        require("_weight_scale" in stored, "_weight_scale is missing")
        data, scale = stored["_weight_qdata"], stored["_weight_scale"]
        require(
            scale.dim() == 2,
            f"_weight_scale must have 2 dimensions, got {dtype_name(scale.dtype)} "
            f"{tuple(scale.shape)}",
        )
        if data.dtype in (torch.int8, torch.uint8) and data.shape == (rows, columns // 2):
            groups = len(scale)
            for name in ("_weight_scale", "_weight_zero_point"):
                require_layout(stored, name, None, groups, rows)
            return cls(PAIRS, cls.size_of_groups(groups, columns, may_be_row=False))
        kinds = {torch.int8: BYTES, torch.float8_e4m3fn: FLOATS}
        require(
            data.dtype in kinds and data.shape == (rows, columns),
            f"qdata must be int8 or float8_e4m3fn ({rows}, {columns}), or two integers in a byte, "
            f"got {dtype_name(data.dtype)} {tuple(data.shape)}",
        )
        height = 1 if scale.dim() == 2 and len(scale) == 1 else rows
        require_layout(stored, "_weight_scale", None, height, scale.shape[-1])
        zero = stored.get("_weight_zero_point", scale)
        require(
            zero.shape == scale.shape,
            f"zero_point must have scale's shape {tuple(scale.shape)}, got {tuple(zero.shape)}",
        )
        size = cls.size_of_groups(scale.shape[-1], columns, may_be_row=True)
        return cls(kinds[data.dtype], size)

    @staticmethod
    def size_of_groups(groups: int, columns: int, may_be_row: bool) -> int:
        """Return the size of a file's groups: a multiple of 32, or perhaps that of any row."""
        size = columns // groups if groups and columns % groups == 0 else 0
        is_row = may_be_row and groups == 1
        is_known = size > 0 and (is_row or group_size_of(size) is not None)
        require(
            is_known,
            f"groups must have a multiple of 32 weights, got {groups} groups for {columns} inputs",
        )
        return size

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        data, scale = stored["_weight_qdata"], stored["_weight_scale"]
        zero = stored.get("_weight_zero_point")
        if self.kind == PAIRS:
            words = data.view(torch.uint8).bitwise_xor(SIGNS).view(torch.int32)
            return self.of_pairs(words, scale.t(), zero, dtype)
        scale = scale.expand(len(data), -1)
        if self.kind == FLOATS:
            wide = scale.to(compute_type(dtype)).contiguous()
            return grouped_bytes(data.view(torch.uint8), wide, None)
        if zero is None or not zero.any():
            zero = None
        has_groups, is_narrow = group_size_of(self.group_size) is not None, has_4_bits(data)
        if zero is None and not (has_groups and is_narrow):
            return grouped_bytes(data, scale.to(dtype).contiguous(), None)
        require(is_narrow, "zero_point must be 0 with 8 bits")
        require(
            has_groups,
            "zero_point must be 0 in groups that are no multiple of 32 weights, got groups of "
            f"{self.group_size}",
        )
        shifted: Any = 8 if zero is None else zero.float() + 8
        zeros = torch.zeros_like(scale, dtype=torch.float32) + shifted
        words = words_of((data + 8).view(torch.uint8))
        return grouped(words, scale.to(dtype), zeros.to(dtype), None, self.group_size)

    def of_pairs(self, words: Tensor, scale: Tensor, zero: Any, dtype: torch.dtype) -> Integers:
        require(bool(scale.all()), "scale must not have zeros")
        ours = 8 - zero.t().float() / scale.float()
        return grouped(words, scale.to(dtype), ours.to(dtype), None, self.group_size)

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        raise UnreadableError("save_quantized writes it as compressed-tensors does")


def has_4_bits(data: Tensor) -> bool:
    """Whether all integers fit 4 bits."""
    least, most = data.aminmax()
    return bool(least >= -8 and most <= 7)
