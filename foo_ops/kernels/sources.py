"""Where kernels come from. Light: no Numba, no LLVM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from foo_ops.kernels.jit import Kernel


class KernelError(Exception):
    """Why a user's kernel cannot be compiled, in one message."""


class Source(Protocol):
    """What `foo_ops.kernels.resolve.resolve` asks for a kernel."""

    @property
    def title(self) -> str:
        """The beginning of the names of its files."""

    def fingerprint(self) -> bytes:
        """Another for other code."""

    def build(self, signature: str) -> Kernel: ...

    def explain(self, signature: str, error: Exception) -> KernelError | None:
        """What is raised instead of what its compilation raised, or None for the latter."""


class Module(Source):
    """A module of ``foo_ops.kernels``. The key covers the sources of all of them."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    @property
    def title(self) -> str:
        return self._kernel

    def fingerprint(self) -> bytes:
        return self._kernel.encode()

    def build(self, signature: str) -> Kernel:
        name, _, variant = self._kernel.partition(".")
        options = {variant: True} if variant else {}
        module = importlib.import_module(f"foo_ops.kernels.{name}")
        kernel: Kernel = module.build(signature, **options)
        return kernel

    def explain(self, signature: str, error: Exception) -> None:
        """The package's own kernels compile; whoever writes one wants to see all of it."""


# Of users' kernels, by the kernel's name. Threads may add to it while others read.
SOURCES: dict[str, Source] = {}
