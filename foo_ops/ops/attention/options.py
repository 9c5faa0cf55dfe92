"""Describe attention's options once: for schemas, public functions, checks and formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

# The types of fields as schemas write them.
_SCHEMA_TYPES = {"bool": "bool", "int": "SymInt", "float": "float", "float | None": "float?"}


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The keyword arguments of attention, and their defaults.

    csrc/ops/attention has the same struct. `foo_ops.attention` documents the options, and
    foo_ops/ops/attention/part.py documents part_offset, which is not public.
    """

    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    part_offset: int | None = None

    def checked(self) -> tuple[float, int, int, float]:
        """Return the options that a check can refuse, in the order of the C++ functions."""
        return self.dropout_p, self.window_left, self.window_right, self.softcap


DEFAULTS = dataclasses.asdict(AttentionOptions())
del DEFAULTS["part_offset"]
# Packed sequences are causal by ``window_right=0``.
PACKED = tuple(name for name in DEFAULTS if name != "is_causal")


def schema(*names: str) -> str:
    """Write options as a schema does: ``float? scale=None, float dropout_p=0.0``."""
    types = {field.name: str(field.type) for field in dataclasses.fields(AttentionOptions)}
    return ", ".join(f"{_SCHEMA_TYPES[types[name]]} {name}={DEFAULTS[name]}" for name in names)


def given_options(**options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults.

    The dispatcher takes as long to parse one as to allocate a tensor. Within torch.compile all are
    returned, since a comparison would turn a number that varies into a constant.
    """
    if torch.compiler.is_dynamo_compiling():
        return options
    return {name: value for name, value in options.items() if value != DEFAULTS[name]}
