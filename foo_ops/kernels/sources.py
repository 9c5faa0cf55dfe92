"""Where kernels come from that are no modules of this package. Light: no Numba, no LLVM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from foo_ops.kernels.jit import Kernel


class KernelError(Exception):
    """Why a user's kernel cannot be compiled, in one message."""


class Source(Protocol):
    """What `foo_ops.kernels.jit.resolve` asks for a kernel."""

    @property
    def title(self) -> str:
        """The beginning of the names of its files."""

    def fingerprint(self) -> bytes:
        """Another for other code."""

    def build(self, signature: str) -> Kernel: ...

    def explain(self, signature: str, error: Exception) -> KernelError | None:
        """What is raised instead of what its compilation raised, or None for the latter."""


# By the kernel's name. Threads may add to it while others read.
SOURCES: dict[str, Source] = {}
