"""Automatic mixed precision. torch.autocast("foo") has the operator lists of CUDA."""

import torch


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast("foo", dtype=...)`` takes."""
    return [torch.float16, torch.bfloat16]


def is_autocast_enabled() -> bool:
    """Whether this thread is inside of ``torch.autocast("foo")``."""
    return torch.is_autocast_enabled("foo")


def set_autocast_enabled(enabled: bool) -> None:
    torch.set_autocast_enabled("foo", enabled)


def get_autocast_dtype() -> torch.dtype:
    """The dtype that autocast uses: float16 unless another one was asked for."""
    return torch.get_autocast_dtype("foo")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("foo", dtype)
