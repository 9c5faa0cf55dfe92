"""Read environment variables that switch something on or off."""

from __future__ import annotations

import os


def switch(name: str) -> bool | None:
    """Return whether an environment variable, 0 or 1, is 1; None if it is not set."""
    chosen = os.environ.get(name)
    if chosen and chosen not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {chosen}")
    return chosen == "1" if chosen else None
