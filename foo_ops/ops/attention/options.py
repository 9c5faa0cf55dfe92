"""Describe attention's options once: for schemas, public functions, checks and formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

# The types of fields as schemas write them.
_SCHEMA_TYPES = {
    "bool": "bool",
    "int": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
}


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The keyword arguments of attention, and their defaults.

    csrc/ops/attention/checks.h has the same struct. `foo_ops.attention` documents the options.
    part_offset is not public: the keys are then a part of all keys, query i stands at key
    i + part_offset, to which windows and ALiBi are aligned, and a backward pass may get the
    logsumexp of all keys.
    """

    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    part_offset: int | None = None


_FIELDS = {field.name: field for field in dataclasses.fields(AttentionOptions)}
DEFAULTS = {name: it.default for name, it in _FIELDS.items() if name != "part_offset"}
# Packed sequences are causal by ``window_right=0``.
PACKED = tuple(name for name in DEFAULTS if name != "is_causal")


def schema(*names: str) -> str:
    """Write options as a schema does: ``float? scale=None, float dropout_p=0.0``."""
    fields = map(_FIELDS.__getitem__, names)
    return ", ".join(f"{_SCHEMA_TYPES[str(it.type)]} {it.name}={it.default}" for it in fields)


def given_options(**options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults.

    The dispatcher takes as long to parse one as to allocate a tensor. Within torch.compile all are
    returned, since a comparison would turn a number that varies into a constant.
    """
    if torch.compiler.is_dynamo_compiling():
        return options
    return {name: value for name, value in options.items() if value != DEFAULTS[name]}
