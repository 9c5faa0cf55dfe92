"""Registries of Python functions' meanings in kernels, and in no other code of Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from numba.core.imputils import Registry
from numba.core.typing import templates

NAME = "foo_ops kernel"

functions = Registry("foo_ops functions")
signatures = templates.Registry()


def define_signature(
    function: Callable[..., Any], find: Callable[[tuple[Any, ...]], Any | None]
) -> None:
    """Let ``find`` choose the signature for argument types, before Numba's own signatures."""

    class Template(templates.AbstractTemplate):
        # Signatures with a target take precedence over those for all targets.
        metadata: ClassVar[dict[str, str]] = {"target": NAME}

        def generic(self, args: tuple[Any, ...], kws: Any) -> Any | None:
            return find(args) if not kws else None

    signatures.register_global(function)(Template)
