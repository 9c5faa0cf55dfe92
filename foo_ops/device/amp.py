"""Automatic mixed precision: torch.autocast("foo") has the operator lists of CUDA."""

import torch


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that ``torch.autocast("foo", dtype=...)`` takes."""
    return [torch.float16, torch.bfloat16]


def is_autocast_enabled() -> bool:
    """Return whether this thread is inside of ``torch.autocast("foo")``."""
    return torch.is_autocast_enabled("foo")


def set_autocast_enabled(enabled: bool) -> None:
    torch.set_autocast_enabled("foo", enabled)


def get_autocast_dtype() -> torch.dtype:
    """Return the dtype that autocast uses: float16 unless another one was chosen."""
    return torch.get_autocast_dtype("foo")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("foo", dtype)
