"""Kernels: the compiler's input, its sources, and the table of all kernels.

Imports neither Numba nor LLVM.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function to compile: Python source that Numba understands, and its argument types.

    The compiled C function takes these arguments and returns nothing. If ``vectorizes``, LLVM turns
    loops over scalars into loops over vectors; kernels on explicit vectors do not need it.
    """

    function: Callable[..., None]
    argument_types: tuple[Any, ...]
    vectorizes: bool = False


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Everything that the code of a kernel depends on, except compiler and processor.

    Attributes:
        content: bytes that differ if functions, constants or options do; None if these refer to too
            many objects to visit, and the kernel is not kept on disk.
        modules: the modules of ``foo_ops.kernels`` that make the kernel. Their sources count, with
            all modules that they import.
    """

    content: bytes | None
    modules: frozenset[str]


# The end of the signature of a kernel that checks its accesses and records the first one outside:
# see csrc/launch/kernel_table.h.
CHECKED = "checked"


class KernelError(Exception):
    """A user's kernel cannot be compiled; the message has the reason."""


class KernelTypeError(KernelError, TypeError):
    """A kernel uses an index that the tensor does not take."""


class KernelValueError(KernelError, ValueError):
    """No kernel can be made of a text."""


# The beginning of the message of a `KernelTypeError`.
WRONG_INDEX = "wrong index: "


class Source(Protocol):
    """A kernel's source; `build` is called only if the object code is not on disk."""

    @property
    def title(self) -> str:
        """The beginning of the kernel's file names in the cache."""

    def fingerprint(self, signature: str) -> Fingerprint:
        """Return a fingerprint that differs if the code does."""

    def build(self, signature: str) -> Kernel: ...

    def interpret(self, signature: str) -> Kernel | None:
        """Return the kernel as Python (interpret.py), or None if it is always compiled."""

    def settle(self) -> None:
        """Fix the values that the code depends on, since a kernel has been made from them."""

    def explain(self, signature: str, error: Exception) -> KernelError | None:
        """Return the error to raise in place of the compiler's, or None to raise that in full."""


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
        """Return the fingerprint of a kernel made with these options."""
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
        """Return None: the package's own kernels use vectors and register tiles."""

    def settle(self) -> None:
        """Do nothing: the package's own constants do not change."""

    def explain(self, signature: str, error: Exception) -> None:
        """Return None: an author of the package's kernels needs the whole error."""


class KernelTable(dict[str, Source]):
    """Kernels by the name that launchers use. Threads may add to it while others read.

    A name may also be a family's name, a space, and the text that the kernel is made of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.families: dict[str, tuple[Maker, Mapping[str, Any]]] = {}

    def __missing__(self, name: str) -> Source:
        family, _, text = name.partition(" ")
        return TextKernel(family, text, *self.families[family])


@dataclasses.dataclass(frozen=True)
class TextKernel(Source):
    """A kernel made of a text; its code depends on nothing else."""

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
        """Return None: the kernel uses vectors."""

    def settle(self) -> None:
        """Do nothing: texts do not change."""

    def explain(self, signature: str, error: Exception) -> KernelError | None:
        """Return the error of an invalid text; None for others, to raise them in full."""
        if not isinstance(error, ValueError):
            return None
        return KernelValueError(f"{self.family}: {error}")


KERNELS = KernelTable()


def size_name(position: int) -> str:
    """Return the name of a tile kernel's function that returns a size of scratch memory."""
    return f"size {position}"
