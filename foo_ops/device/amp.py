"""Automatic mixed precision: torch.autocast("foo") uses CUDA's lists of operators."""

import torch


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that ``torch.autocast("foo", dtype=...)`` supports.

    Example:
        >>> torch.foo.get_amp_supported_dtype()
        [torch.float16, torch.bfloat16]
    """
    return [torch.float16, torch.bfloat16]


def is_autocast_enabled() -> bool:
    """Return whether this thread is inside of ``torch.autocast("foo")``.

    Example:
        >>> with torch.autocast("foo"):
        ...     torch.foo.is_autocast_enabled()
        True
    """
    return torch.is_autocast_enabled("foo")


def set_autocast_enabled(enabled: bool) -> None:
    """Turn autocast on or off for device foo, in this thread.

    Example:
        >>> torch.foo.set_autocast_enabled(False)
        >>> torch.foo.is_autocast_enabled()
        False
    """
    torch.set_autocast_enabled("foo", enabled)


def get_autocast_dtype() -> torch.dtype:
    """Return the dtype that autocast uses, float16 by default.

    Example:
        >>> with torch.autocast("foo", torch.bfloat16):
        ...     torch.foo.get_autocast_dtype()
        torch.bfloat16
    """
    return torch.get_autocast_dtype("foo")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    """Choose the dtype that autocast uses if ``torch.autocast`` is called without one.

    Example:
        >>> torch.foo.set_autocast_dtype(torch.float16)
        >>> torch.foo.get_autocast_dtype()
        torch.float16
    """
    torch.set_autocast_dtype("foo", dtype)
