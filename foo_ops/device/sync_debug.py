"""Report operators that make the host wait for the device implicitly."""

from foo_ops._C import sanitizer as _C

_MODES = ("default", "warn", "error")


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Ignore, warn about or raise for operators that make the host wait for the device.

    These are ``item()``, ``bool(tensor)`` and the like, blocking copies between host and device,
    and operators whose results' sizes depend on values, such as ``nonzero``. ``synchronize()`` does
    not count. The message names the operator.

    Args:
        debug_mode: "default" or 0 does nothing, "warn" or 1 warns, "error" or 2 raises RuntimeError
            before the operator runs.

    Raises:
        ValueError: For any other mode.

    Example:
        >>> torch.foo.set_sync_debug_mode("error")
        >>> torch.ones((), device="foo").item()
        Traceback (most recent call last):
            ...
        RuntimeError: aten::item: called a synchronizing operation: the host waits for the device
        >>> torch.foo.set_sync_debug_mode("default")
    """
    mode = _MODES.index(debug_mode) if debug_mode in _MODES else debug_mode
    if mode not in range(len(_MODES)):
        raise ValueError(
            'set_sync_debug_mode: debug_mode must be "default", "warn", "error", 0, 1 or 2, '
            f"got {debug_mode!r}"
        )
    _C.set_sync_debug_mode(mode)


def get_sync_debug_mode() -> int:
    """Return 0 for "default", 1 for "warn", 2 for "error".

    Example:
        >>> torch.foo.get_sync_debug_mode()
        0
    """
    return _C.get_sync_debug_mode()
