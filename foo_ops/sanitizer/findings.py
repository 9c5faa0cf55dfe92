"""Turn the sanitizer on, and report its findings."""

import contextlib
import functools
import linecache
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from foo_ops._C import sanitizer as _C
from foo_ops.device import _compiled_kernels

# ----------------------------------------------------------------------------------------- findings


_SHOWN_CALLS = 4
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", os.path.dirname(os.__file__))


class Frame(NamedTuple):
    """A call on a Python stack."""

    filename: str
    lineno: int
    name: str

    @property
    def is_in_library(self) -> bool:
        """Whether it is in an installed package, such as torch."""
        return any(part in self.filename for part in _LIBRARIES)

    def __str__(self) -> str:
        text = f'  File "{self.filename}", line {self.lineno}, in {self.name}'
        line = linecache.getline(self.filename, self.lineno).strip()
        return f"{text}\n    {line}" if line else text


@dataclass(frozen=True)
class Access:
    """One side of a finding.

    Attributes:
        deed: "read", "write", "allocation" or "free".
        operator: The operator or call, such as ``aten::add.Tensor``; empty where there is none.
        stream: The number of the stream, 0 for the default one, None for the host.
        stack: The Python stack, from the outermost call to the innermost one.
    """

    deed: str
    operator: str
    stream: int | None
    stack: tuple[Frame, ...]

    @property
    def place(self) -> str:
        """The stream, in words."""
        if self.stream is None:
            return "the host"
        return "the default stream" if self.stream == 0 else f"stream {self.stream}"

    @property
    def own_stack(self) -> tuple[Frame, ...]:
        """The innermost calls outside of libraries, which the user can change."""
        own = [frame for frame in self.stack if not frame.is_in_library]
        return tuple(own or self.stack)[-_SHOWN_CALLS:]

    def __str__(self) -> str:
        verb = {"read": "read by", "write": "written by"}.get(self.deed)
        if verb is None:
            return {"allocation": "allocated again", "free": "freed"}[
                self.deed
            ] + f" on {self.place}"
        return f"{verb} {self.operator or 'code outside of operators'} on {self.place}"


@dataclass(frozen=True)
class Finding:
    """An access that is not ordered after the one that it conflicts with.

    Attributes:
        kind: "race", "use after free", "unsynchronized host read", "host write during copy",
            "uninitialized read" or "host access".
        shape: The shape of the tensor.
        dtype: Its dtype.
        device: Its device, ``cpu`` for pinned memory.
        address: The address of its first byte.
        nbytes: The number of bytes from its first to its last.
        now: The present access.
        before: The access that it conflicts with; None for an uninitialized read.
        user: For a use after free, the last access to the freed memory.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    device: torch.device
    address: int
    nbytes: int
    now: Access
    before: Access | None = None
    user: Access | None = None

    @property
    def operator(self) -> str:
        """The operator or call of the present access."""
        return self.now.operator

    @property
    def streams(self) -> tuple[int | None, ...]:
        """The numbers of the streams, None for the host; that of the present access first."""
        others = (self.user or self.before,) if self.before else ()
        return tuple(access.stream for access in (self.now, *others) if access is not None)

    @property
    def tensor(self) -> str:
        """The tensor, in words."""
        if self.nbytes == 0 and self.dtype is None:
            return f"memory at {self.address:#x} on {self.device}"
        if self.dtype is None:
            return f"{self.nbytes} bytes at {self.address:#x} on {self.device}"
        kind = "pinned tensor" if self.device.type == "cpu" else "tensor"
        return (
            f"{kind} of shape {self.shape} and {self.dtype} on {self.device}, "
            f"{self.nbytes} bytes at {self.address:#x}"
        )

    @property
    def advice(self) -> str:
        """Advice to fix the program."""
        return _ADVICE[self.kind](self)

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.tensor}"]
        for title, access in (("now", self.now), ("before", self.before), ("used", self.user)):
            if access is not None:
                lines += [f"{title}: {access}", *map(str, access.own_stack)]
        return "\n".join([*lines, f"To fix this: {self.advice}"])


class SanitizerError(RuntimeError):
    """Raised for a finding of the sanitizer, with the :class:`Finding` as ``finding``."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class SanitizerWarning(UserWarning):
    """The category of warnings from ``enable(action="warn")``."""


def _stream(access: Access | None) -> str:
    assert access is not None
    return "torch.foo.default_stream()" if access.stream == 0 else f"stream {access.stream}"


def _advice_for_race(finding: Finding) -> str:
    later, earlier = _stream(finding.now), _stream(finding.before)
    return (
        f"let one stream wait for the other, {later}.wait_stream({earlier}), or record an event "
        "after the first access and wait for the event before the second."
    )


def _advice_for_use_after_free(finding: Finding) -> str:
    return (
        f"call tensor.record_stream({_stream(finding.user)}) before the tensor is freed, or let "
        f"{_stream(finding.before)} wait for {_stream(finding.user)} before."
    )


def _advice_for_host_read(finding: Finding) -> str:
    return (
        f"wait for the copy before the host reads: call {_stream(finding.before)}.synchronize(), "
        "synchronize an event, or copy with non_blocking=False."
    )


def _advice_for_host_write(finding: Finding) -> str:
    return (
        f"wait for the copy before the host writes: call {_stream(finding.before)}.synchronize(), "
        "synchronize an event, or write to another buffer."
    )


def _advice_for_uninitialized_read(finding: Finding) -> str:
    return "write the tensor before reading it, or use torch.zeros in place of torch.empty."


def _advice_for_host_access(finding: Finding) -> str:
    return (
        "copy the tensor to the CPU first with tensor.cpu(); only kernels may use its data_ptr()."
    )


_ADVICE = {
    "race": _advice_for_race,
    "use after free": _advice_for_use_after_free,
    "unsynchronized host read": _advice_for_host_read,
    "host write during copy": _advice_for_host_write,
    "uninitialized read": _advice_for_uninitialized_read,
    "host access": _advice_for_host_access,
}


def _access(raw: dict[str, Any] | None) -> Access | None:
    if raw is None:
        return None
    stack = tuple(Frame(*frame) for frame in raw["stack"])
    return Access(raw["deed"], raw["operator"], raw["stream"], stack)


def make_finding(raw: dict[str, Any]) -> Finding:
    """Make a finding from the C++ part's description."""
    now = _access(raw["now"])
    assert now is not None
    facts = {name: raw[name] for name in ("kind", "shape", "dtype", "device", "address", "nbytes")}
    return Finding(**facts, now=now, before=_access(raw["before"]), user=_access(raw["user"]))


# ------------------------------------------------------------------------------------------ control


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
