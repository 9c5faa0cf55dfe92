"""Cut attention on DTensors among processes, by batch and heads; packed sequences by heads.

Where heads of query share those of key and value, both are cut into equal parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEADS = "b h . ., b h . ., b h . ."
ADDED = "b h . ., b h, b h"
PACKED = "h ., h ., h ., ., ., ., ., h, h"

SHARDINGS = {
    "attention": f"{HEADS}, {ADDED} -> b h . ., b h .",
    "attention_seeded": f"{HEADS}, {ADDED}, . -> b h . ., b h .",
    "attention_backward": (
        f"b h . ., b h ., {HEADS}, {ADDED}, b h . ., b h ., . -> {HEADS}, {ADDED}"
    ),
    "attention_varlen": f"{PACKED} -> h ., h .",
    "attention_varlen_seeded": f"{PACKED}, . -> h ., h .",
    "attention_varlen_backward": f"h ., h ., {PACKED}, h ., h ., . -> h ., h ., h ., h, h",
}


def make_sharding(name: str) -> Callable[..., str]:
    """Make the rule for `library.register_sharding` of one of these operators."""
    public_name = name.removesuffix("_seeded").removesuffix("_backward")

    def sharding(*inputs: Any, dropout_p: float = 0.0, **options: Any) -> str:
        if dropout_p > 0.0:
            # What is dropped follows from the places of weights in the tensors of one process.
            raise NotImplementedError(
                f"{public_name}: dropout_p must be 0 for DTensors, got {dropout_p:g}"
            )
        return SHARDINGS[name]

    return sharding
