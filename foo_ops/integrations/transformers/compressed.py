"""The part of config.json that compressed-tensors' checkpoints have, without that package."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.utils import is_compressed_tensors_available
from transformers.utils.quantization_config import CompressedTensorsConfig, QuantizationMethod

from foo_ops.integrations.transformers.formats import CompressedTensors
from foo_ops.integrations.transformers.packed_experts import packed_layers
from foo_ops.ops.linear_quantized import GROUP_SIZES

READ = {
    (4, "group"): ("pack-quantized",),
    (4, "channel"): ("pack-quantized",),
    (8, "channel"): ("pack-quantized", "int-quantized", "naive-quantized"),
    (8, "group"): ("pack-quantized", "int-quantized", "naive-quantized"),
}
"""Formats of integers that are read, by bits and strategy."""
FLOATS = {(8, strategy): ("float-quantized",) for strategy in ("channel", "group", "tensor")}
"""The same of floating-point numbers."""


class StoredConfig(CompressedTensorsConfig):
    """A quantization configuration as it is in the file."""

    def __init__(self, dequantize: bool = False, **settings: Any) -> None:
        self.quant_method = QuantizationMethod.COMPRESSED_TENSORS
        self.dequantize = dequantize
        self.use_optimized_inference = False
        self.quantization_config = None
        self.settings = {"quant_method": self.quant_method.value} | settings

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.settings)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class ConfigReader:
    """Makes the configuration, by the package's classes where it is installed."""

    @staticmethod
    def from_dict(settings: dict[str, Any], **keywords: Any) -> Any:
        has_package = is_compressed_tensors_available() and not has_act_order(settings)
        kind = CompressedTensorsConfig if has_package else StoredConfig
        return kind.from_dict(settings, **keywords)


def has_act_order(settings: dict[str, Any]) -> bool:
    """Whether inputs have groups in another order, which the package no longer reads."""
    groups = (settings.get("config_groups") or {}).values()
    return any((it.get("weights") or {}).get("actorder") in ("group", True) for it in groups)


def is_read(config: Any) -> bool:
    """Whether our layers have the formats of a configuration."""
    settings = config.to_dict()
    if any(settings.get(it) for it in ("sparsity_config", "transform_config")):
        return False
    for group in (settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        kind: Any = (weights.get("num_bits"), weights.get("strategy"))
        format = group.get("format") or settings.get("format")
        known: Any = FLOATS if weights.get("type", "int") == "float" else READ
        if format not in known.get(kind, ()):
            return False
        if kind[0] == 8 and not weights.get("symmetric", True):
            return False
        if kind[1] == "group" and weights.get("group_size", 0) % GROUP_SIZES[0] > 0:
            return False
    return True


def strategy_of(format: CompressedTensors, is_row: bool) -> str:
    if not format.has_rows:
        return "tensor"
    return "channel" if is_row else "group"


def described(model: nn.Module) -> StoredConfig:
    """Return the configuration of a model with packed layers, whose activations are floating."""
    linear = [name for name, it in model.named_modules() if isinstance(it, nn.Linear)]
    widths = {name: it.in_features for name, it in packed_layers(model)}
    packed = {name: CompressedTensors.of(it) for name, it in packed_layers(model)}
    # A row may be one group like those of other layers: readers prefer one scheme for all.
    sizes = {it.group_size for name, it in packed.items() if it.group_size < widths[name]}
    layers: dict[CompressedTensors, list[str]] = defaultdict(list)
    for name, format in packed.items():
        is_row = format.group_size == widths[name] and format.group_size not in sizes
        layers[replace(format, group_size=-1) if is_row else format].append(name)
    groups = {}
    for number, (format, names) in enumerate(layers.items()):
        is_row = format.group_size == -1
        weights = {
            "num_bits": format.bits,
            "type": "int" if format.float_scale is None else "float",
            "symmetric": format.is_symmetric,
            "strategy": strategy_of(format, is_row),
            "group_size": None if is_row else format.group_size,
            "actorder": "group" if format.has_index else None,
        }
        groups[f"group_{number}"] = {
            # Readers that fuse layers know "Linear" best.
            "targets": ["Linear"] if len(layers) == 1 else names,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": format.name,
        }
    formats = {it["format"] for it in groups.values()}
    return StoredConfig(
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        config_groups=groups,
        ignore=[name for name in linear if name not in packed],
    )
