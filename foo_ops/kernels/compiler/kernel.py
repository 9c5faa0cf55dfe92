"""Kernels: what the compiler is given, where that comes from, and the table in which all are found.

Light: no Numba, no LLVM.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function to compile: Python source that Numba understands and its argument types.

    The compiled C function takes these arguments and returns nothing. If it ``vectorizes``, LLVM
    turns loops over scalars into loops over vectors; kernels on explicit vectors need no such
    thing.
    """

    function: Callable[..., None]
    argument_types: tuple[Any, ...]
    vectorizes: bool = False


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Describes all that the code of a kernel depends on, but for compiler and processor.

    Attributes:
        content: bytes that differ wherever functions, constants or options do; None where these
            refer to more than can be looked at, and nothing is kept on disk.
        modules: those of ``foo_ops.kernels`` that make the kernel. They count with their sources
            and all that they import.
    """

    content: bytes | None
    modules: frozenset[str]


# Stands at the end of the signature of a kernel that checks its accesses, and tells where one was
# outside; see csrc/launch/kernel_table.h.
CHECKED = "checked"


class KernelError(Exception):
    """Says in one message why a user's kernel cannot be compiled."""


class KernelTypeError(KernelError, TypeError):
    """Says that a kernel gives a tensor an index that it does not take."""


class KernelValueError(KernelError, ValueError):
    """Says that a text is not one that a kernel can be made of."""


# The beginning of the message.
WRONG_INDEX = "wrong index: "


class Source(Protocol):
    """Describes a kernel to the compiler, which asks for more only where nothing is on disk."""

    @property
    def title(self) -> str:
        """The beginning of the names of its files."""

    def fingerprint(self, signature: str) -> Fingerprint:
        """Return what differs wherever the code does."""

    def build(self, signature: str) -> Kernel: ...

    def interpret(self, signature: str) -> Kernel | None:
        """Return the kernel as plain Python (interpret.py), or None where it is compiled always."""

    def settle(self) -> None:
        """Hold on to what the code depends on, since there is a kernel that was made of it."""

    def explain(self, signature: str, error: Exception) -> KernelError | None:
        """Return what is raised in place of the compiler's error, or None to raise that one."""


@dataclasses.dataclass(frozen=True)
class Maker:
    """A function that makes kernels, in a module that is imported when it is called."""

    module: str
    function: str

    def __call__(self, signature: str, *args: Any, **options: Any) -> Kernel:
        make = getattr(importlib.import_module(self.module), self.function)
        kernel: Kernel = make(signature, *args, **options)
        return kernel

    def fingerprint(self, *options: Any) -> Fingerprint:
        """Describe a kernel that is made with these options, and with the signature."""
        return Fingerprint(repr((self, options)).encode(), frozenset((self.module,)))


@dataclasses.dataclass(frozen=True)
class OwnKernel(Source):
    """A kernel of this package."""

    name: str
    maker: Maker
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.name

    def fingerprint(self, signature: str) -> Fingerprint:
        return self.maker.fingerprint(dict(self.options))

    def build(self, signature: str) -> Kernel:
        return self.maker(signature, **self.options)

    def interpret(self, signature: str) -> None:
        """The package's own kernels are made of vectors and tiles in registers."""

    def settle(self) -> None:
        """The package's own constants do not change."""

    def explain(self, signature: str, error: Exception) -> None:
        """The package's own kernels compile; whoever writes one wants to see all of it."""


class KernelTable(dict[str, Source]):
    """Kernels by the name that launchers ask for. Threads may add to it while others read.

    A name may also be that of a family and, after a space, the text that its kernel is made of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.families: dict[str, tuple[Maker, Mapping[str, Any]]] = {}

    def __missing__(self, name: str) -> Source:
        family, _, text = name.partition(" ")
        return TextKernel(family, text, *self.families[family])


@dataclasses.dataclass(frozen=True)
class TextKernel(Source):
    """A kernel that is made of a text, which is all that its code depends on."""

    family: str
    text: str
    maker: Maker
    options: Mapping[str, Any]

    @property
    def title(self) -> str:
        return self.family

    def fingerprint(self, signature: str) -> Fingerprint:
        return self.maker.fingerprint(self.text, dict(self.options))

    def build(self, signature: str) -> Kernel:
        return self.maker(signature, self.text, **self.options)

    def interpret(self, signature: str) -> None:
        """It is made of vectors."""

    def settle(self) -> None:
        """Texts do not change."""

    def explain(self, signature: str, error: Exception) -> KernelError | None:
        """Tell what is wrong with the text; of other errors who writes one wants to see all."""
        if not isinstance(error, ValueError):
            return None
        return KernelValueError(f"{self.family}: {error}")


KERNELS = KernelTable()


def size_name(position: int) -> str:
    """Return what the function of a tile kernel is called that gives a size of scratch memory."""
    return f"size {position}"
