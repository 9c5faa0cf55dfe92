"""Hold what functions of Python mean in kernels, and in no other code that Numba compiles."""

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
    """Let ``find`` tell the signature for types of arguments, before Numba's own signatures."""

    class Template(templates.AbstractTemplate):
        # Where signatures are found for a target, those for all targets come after them.
        metadata: ClassVar[dict[str, str]] = {"target": NAME}

        def generic(self, args: tuple[Any, ...], kws: Any) -> Any | None:
            return find(args) if not kws else None

    signatures.register_global(function)(Template)
