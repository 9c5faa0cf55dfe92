"""What the rules of this folder cannot know, by model type."""

from __future__ import annotations

from typing import Any

EXCEPTIONS: dict[str, dict[str, Any]] = {}
"""Fields of a configuration; those of a sub-configuration are a dictionary."""

INPUTS: dict[str, Any] = {}
"""Functions of a model and the side of padding that give inputs: all, or those beside others."""

WITHOUT: dict[str, tuple[str, ...]] = {}
"""Arguments that are not given."""
