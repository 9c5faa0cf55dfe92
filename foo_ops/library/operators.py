"""Find operators by their names, and read their schemas."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foo_ops._operators import Definition, take_declared
from foo_ops.library.symbols import have_sizes

DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "foo": "PrivateUse1"}

_NAME = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?")

# A registration without a library lasts as long as the process.
_kept: list[Any] = []


class NoSuchOperatorError(ValueError, AttributeError):
    """A wrong value for an argument, and a name that is missing in ``torch.ops``."""


def find(op: str | torch._ops.OpOverload | torch.library.CustomOpDef) -> torch._ops.OpOverload:
    """Return the operator with a name such as ``"foo::abs.out"``, or the one that is given.

    Each function of the kit that takes an operator begins with it, before a decorator is returned.

    Raises:
        ValueError: for anything else, and for a name without a namespace.
        NoSuchOperatorError: where there is no such operator.
    """
    if isinstance(op, torch.library.CustomOpDef):
        return op._opoverload
    if isinstance(op, torch._ops.OpOverload):
        return op
    namespace, packet, overload = parse(op)
    found = getattr(getattr(torch.ops, namespace), packet, None)
    found = getattr(found, overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise NoSuchOperatorError(
            f"{op}: there is no such operator; define it with foo_ops.library.define"
        )
    return found


def parse(name: str) -> tuple[str, str, str | None]:
    """Return the namespace, the name and the overload of ``"mylib::f.out"``, which may be new."""
    parts = _NAME.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        raise ValueError(
            f"the name of an operator must have the form mylib::f or mylib::f.out, got {name!r}"
        )
    namespace, packet, overload = parts.groups()
    return namespace, packet, overload


def qualified(name: str | torch._ops.OpOverload, library: torch.library.Library) -> str:
    """Return a library's name for an operator with its namespace; it may be defined later."""
    if isinstance(name, torch._ops.OpOverload):
        return name.name()
    if isinstance(name, str) and "::" not in name:
        name = f"{library.ns}::{name}"
    parse(name)
    return name


def short_name(operator: torch._ops.OpOverload) -> str:
    """Return an operator's name in messages, without namespace and overload."""
    return operator.name().partition("::")[2].partition(".")[0]


def describe(function: Callable[..., Any]) -> str:
    """Say where a function is, for messages."""
    code = function.__code__
    return f"{function.__name__} ({code.co_filename}:{code.co_firstlineno})"


DEFINITIONS: dict[str, Definition] = {}


def define_or_take(
    name: str,
    module: str | None,
    schema: str,
    tags: tuple[torch.Tag, ...],
    library: torch.library.Library | None = None,
) -> Definition:
    """Define an operator, in a library of its own unless one is given, or take its declaration."""
    namespace, _, own_name = name.partition("::")
    declared = take_declared(name, module, own_name + schema, tags)
    if declared is not None:
        if library is not None:
            keep(declared, library)
        return declared
    if library is None:
        library = torch.library.Library(namespace, "FRAGMENT")
    torch.library.define(name, schema, lib=library, tags=tags)
    return Definition(library, module, own_name + schema, tags)


def own_library(op: Any, lib: torch.library.Library | None) -> torch.library.Library | None:
    """Return the library given for a registration, or else that of the operator, if it has one.

    So what is registered for an operator ends with it, when another takes its place.
    """
    name = op.name() if isinstance(op, torch._ops.OpOverload) else op
    if lib is not None or not isinstance(name, str) or name not in DEFINITIONS:
        return lib
    return DEFINITIONS[name].library


def library_of(name: str, lib: torch.library.Library | None) -> torch.library.Library:
    """Return the library that a registration for an operator belongs to."""
    library = own_library(name, lib)
    if library is None:
        library = torch.library.Library(name.partition("::")[0], "FRAGMENT")
        _kept.append(library)
    return library


def keep(registration: Any, lib: torch.library.Library | None) -> None:
    """Keep a registration of ours as long as its library."""
    (_kept if lib is None else lib._registration_handles).append(registration)


BACKWARDS: dict[str, str] = {}
"""The operators that compute gradients, by those whose gradients they are."""
VARIANTS: dict[str, str] = {}
"""The operators that those are differentiated as which work in place."""


@dataclasses.dataclass(frozen=True)
class _Note:
    """An entry of a table, which ends with a library."""

    table: dict[str, Any]
    name: str

    def destroy(self) -> None:
        self.table.pop(self.name, None)


def note(table: dict[str, Any], name: str, value: Any, lib: torch.library.Library | None) -> None:
    """Note what was registered for an operator, for as long as its library lasts."""
    table[name] = value
    keep(_Note(table, name), lib)


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An argument of an operator, as a kernel takes it.

    Attributes:
        kind: one of the values of `_KINDS`; of a generator a kernel gets a seed.
        role: "read"; "in place", of a tensor that the operator writes; "out", of one that is there
            only to be written, which stands after the ``*`` of the schema.
        length: how many numbers a list must have, or -1 for any.
        choices: what a text may be, where the kernel is known.
    """

    name: str
    kind: str
    is_optional: bool
    role: str
    length: int = -1
    choices: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def schema_type(self) -> str:
        """Return the type as schemas have it; an int may be symbolic."""
        type_ = _SCHEMA_TYPES[self.kind]
        if self.length >= 0:
            type_ = type_.replace("[]", f"[{self.length}]")
        return type_ + "?" * self.is_optional

    @property
    def is_tensor(self) -> bool:
        return self.kind == "tensor"


_SCHEMA_TYPES = {
    "tensor": "Tensor",
    "float": "float",
    "int": "SymInt",
    "bool": "bool",
    "scalar": "Scalar",
    "floats": "float[]",
    "ints": "SymInt[]",
    "text": "str",
    "dtype": "ScalarType",
}
# By what schemas say of them.
_KINDS = {
    "Tensor": "tensor",
    "List[Tensor]": "tensors",
    "float": "float",
    "int": "int",
    "bool": "bool",
    "number": "scalar",
    "List[float]": "floats",
    "List[int]": "ints",
    "str": "text",
    "ScalarType": "dtype",
    "Generator": "generator",
}


def parameters_of(operator: torch._ops.OpOverload) -> tuple[Parameter, ...]:
    """Return the parameters of an operator that is to have a kernel of Numba.

    Raises:
        TypeError: where an argument has a type that kernels do not take.
    """
    return tuple(_parameter(operator, argument) for argument in operator._schema.arguments)


def _parameter(operator: torch._ops.OpOverload, argument: torch._C.Argument) -> Parameter:
    type_ = argument.real_type
    is_optional = isinstance(type_, torch._C.OptionalType)
    if is_optional:
        type_ = type_.getElementType()
    kind = _KINDS.get(str(type_))
    if kind is None:
        raise TypeError(
            f"{operator.name()}: a kernel of Numba takes arguments of type Tensor, Tensor[], "
            "Scalar, float, int, bool, float[], int[], str, ScalarType and Generator, and optional "
            f"ones; {argument.name} is {type_}"
        )
    if kind == "generator":
        # A kernel gets a seed, whether or not a generator is given.
        return _generator(operator, argument.name)
    written = "out" if argument.kwarg_only and kind == "tensor" else "in place"
    role = written if argument.is_write else "read"
    size: int | None = argument.N  # type: ignore[attr-defined]
    length = -1 if size is None else size
    return Parameter(argument.name, kind, is_optional, role, length)


def _generator(operator: torch._ops.OpOverload, name: str) -> Parameter:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        raise TypeError(
            f"{operator.name()}: an operator with a generator must have the tag "
            "torch.Tag.nondeterministic_seeded, or torch.compile may call it once for two calls"
        )
    return Parameter(name, "generator", False, "read")


def functionalize_out(operator: torch._ops.OpOverload) -> None:
    """Let f.out(*inputs, out=out) be out.copy_(f(*inputs)) under functionalization.

    torch.Tag.out would say the same, but Inductor 2.13 then allocates the output of the functional
    operator itself and fails for dynamic shapes: FixedLayout takes no SymInt.
    """
    functional = operator._overloadpacket.default
    names = [a.name for a in operator._schema.arguments if a.is_write and a.kwarg_only]

    @operator.py_functionalize_impl
    def functionalize(ctx: Any, *inputs: Any, **keywords: Any) -> Any:
        outs = [keywords.pop(name) for name in names]
        with ctx.mode:
            results = functional(*inputs, **keywords)
            for out, result in zip(outs, (results,) if len(outs) == 1 else results):
                if not have_sizes(out.shape, result.shape):
                    out.resize_(result.shape)
                out.copy_(result)
        return outs[0] if len(outs) == 1 else tuple(outs)
