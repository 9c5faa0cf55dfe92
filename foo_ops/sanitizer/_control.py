"""Switches the sanitizer on and off, and handles findings."""

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

from foo_ops._C import sanitizer as _C
from foo_ops.device import _compiled_kernels
from foo_ops.sanitizer.findings import Finding, SanitizerError, SanitizerWarning, make_finding

Action = Literal["raise", "warn"]
# An exception ends the current call, or the next Python call if that cannot be stopped.
Taker = Callable[[Finding], None]

_lock = threading.RLock()
# Handlers of findings: the last is the innermost check()'s, the first enable()'s.
_takers: list[Taker] = []
_enabled: list[Taker] = []
# File descriptors for findings that end the process.
_stderr = [2]


def _raise(finding: Finding) -> None:
    raise SanitizerError(finding)


def _warn(finding: Finding) -> None:
    warnings.warn(str(finding), SanitizerWarning, stacklevel=3)


def _type_that_makes(error: BaseException) -> type[BaseException]:
    """Return a type whose only instance is this error, since Python creates it from a type."""
    # Nothing else may keep the error alive, and with it the frames that it passes through.
    errors = [error]
    names = {"__new__": lambda cls: errors.pop(), "__module__": type(error).__module__}
    return type(type(error).__name__, (type(error),), names)


def _report(
    raw: dict[str, Any], consequence: Literal["raise", "raise later", "end"]
) -> type[BaseException] | None:
    finding = make_finding(raw)
    if consequence == "end":
        os.write(_stderr[-1], f"foo_ops.sanitizer: {finding}\n".encode())
        return None
    try:
        _takers[-1](finding)
    except BaseException as error:
        # Operators on the CPU, and code that touches memory, cannot be stopped.
        if consequence == "raise":
            raise
        return _type_that_makes(error)
    return None


@contextlib.contextmanager
def last_words_to(descriptor: int) -> Iterator[None]:
    """Print findings that end the process to a descriptor, as standard error may be captured."""
    _stderr.append(descriptor)
    try:
        yield
    finally:
        _stderr.pop()


def _watched(name: str, written: list[bool | None], kernel: Callable[..., Any]) -> Any:
    return functools.partial(_C.call_kernel, name, written, kernel)


def _push(taker: Taker) -> None:
    with _lock:
        _takers.append(taker)
        if len(_takers) == 1:
            _C.start(_report)
            _compiled_kernels.put_around("sanitizer", _watched)


def _remove(taker: Taker) -> None:
    with _lock:
        if len(_takers) == 1:
            _compiled_kernels.put_around("sanitizer", None)
            _C.stop()
        _takers.remove(taker)


@contextlib.contextmanager
def check() -> Iterator[list[Finding]]:
    """Collect findings of all threads, inside of ``with``.

    Earlier work on the device counts as finished. Within another check, or with the sanitizer
    enabled for the process, the innermost list gets the findings.

    Returns:
        The list that findings are added to.

    Example:
        >>> from foo_ops import sanitizer
        >>> with sanitizer.check() as findings:
        ...     x = torch.empty(4, device="foo")
        ...     y = x + 1
        >>> findings[0].kind, findings[0].operator
        ('uninitialized read', 'aten::add')
    """
    findings: list[Finding] = []

    taker: Taker = findings.append
    _push(taker)
    try:
        yield findings
    finally:
        _remove(taker)


def enable(action: Action = "raise") -> None:
    """Watch the whole process from now on.

    ``FOO_SANITIZER=1`` does so when foo_ops is imported.

    Args:
        action: "raise" raises :class:`SanitizerError` for a finding, before the operator runs;
            "warn" warns.

    Raises:
        ValueError: For another action.

    Example:
        >>> from foo_ops import sanitizer
        >>> sanitizer.enable(action="warn")
        >>> sanitizer.is_enabled()
        True
        >>> sanitizer.disable()
    """
    takers: dict[str, Taker] = {"raise": _raise, "warn": _warn}
    if action not in takers:
        raise ValueError(f'enable: action must be "raise" or "warn", got {action!r}')
    with _lock:
        disable()
        _enabled.append(takers[action])
        if _takers:
            _takers.insert(0, takers[action])
        else:
            _push(takers[action])


def disable() -> None:
    """Undo :func:`enable`; without effect if it was not called.

    Example:
        >>> from foo_ops import sanitizer
        >>> sanitizer.disable()
        >>> sanitizer.is_enabled()
        False
    """
    with _lock:
        if _enabled:
            _remove(_enabled.pop())


def is_enabled() -> bool:
    """Return whether the sanitizer is active, by :func:`enable` or inside of :func:`check`.

    Example:
        >>> from foo_ops import sanitizer
        >>> with sanitizer.check():
        ...     sanitizer.is_enabled()
        True
    """
    return bool(_takers)
