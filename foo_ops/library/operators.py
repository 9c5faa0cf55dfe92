"""Operators as their schemas describe them: names, sizes, dtypes, keywords, strings, results."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops._operators import Definition, take_declared
from foo_ops.compat import (
    Argument,
    FunctionSchema,
    OpOverload,
    OpOverloadPacket,
    OptionalType,
    has_kernel_for_key,
    key_for_device,
    pytree,
)

# ------------------------------------------------------------------------------ conditions on sizes


Condition: TypeAlias = "bool | torch.SymBool"
Sizes: TypeAlias = "Sequence[int | torch.SymInt]"


def holds(condition: Condition) -> bool:
    """Return whether a condition on an operator's arguments is true.

    Fake kernels check sizes with it. If a size depends on data, such as a count of nonzero
    elements, torch.compile assumes that the condition is true and checks it when the program runs.

    Args:
        condition: a comparison of sizes.

    Example:
        >>> input = torch.ones(3, 8)
        >>> foo_ops.library.holds(input.shape[-1] % 4 == 0)
        True
    """
    if isinstance(condition, bool):
        return condition
    # Imported here: it takes 0.3 s, and a caller with a symbolic condition has imported it already.
    from torch.fx.experimental.symbolic_shapes import expect_true

    return expect_true(condition)


def is_known(condition: Condition) -> bool:
    """Return whether a condition is known to be true; False if it depends on data."""
    # For Dynamo a symbolic condition is a bool, too.
    if isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def either(one: Condition, other: Condition) -> Condition:
    """Return ``one or other``, without evaluating symbolic conditions."""
    if isinstance(one, bool):
        return one or other
    return one if other is False else other if other is True else one | other


def have_sizes(sizes: Sizes, expected: Sizes) -> bool:
    """Return whether sizes equal the expected ones, as `holds` does.

    Args:
        sizes: a tensor's shape, or some of it.
        expected: sizes that are known, or those of another tensor.

    Example:
        >>> input, weight = torch.ones(3, 8), torch.ones(8)
        >>> foo_ops.library.have_sizes(weight.shape, input.shape[-1:])
        True
    """
    pairs = zip(sizes, expected)
    return len(sizes) == len(expected) and all(holds(size == other) for size, other in pairs)


# ---------------------------------------------------------------------------- operators and schemas

# Find operators by their names, and read their schemas.


DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "foo": "PrivateUse1"}

_NAME = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?")

# A registration without a library lasts as long as the process.
_kept: list[Any] = []


class NoSuchOperatorError(ValueError, AttributeError):
    """An unknown operator: a wrong value for an argument, and a name missing in ``torch.ops``."""


def find(op: str | OpOverload | torch.library.CustomOpDef) -> OpOverload:
    """Return the operator with a name such as ``"foo::abs.out"``, or the one that is given.

    Every function of the kit that takes an operator calls this first, before it returns a
    decorator.

    Raises:
        ValueError: for anything else, and for a name without a namespace.
        NoSuchOperatorError: if there is no such operator.
    """
    if isinstance(op, torch.library.CustomOpDef):
        return op._opoverload
    if isinstance(op, OpOverload):
        return op
    namespace, packet, overload = parse(op)
    found = getattr(getattr(torch.ops, namespace), packet, None)
    found = getattr(found, overload or "default", None)
    if not isinstance(found, OpOverload):
        raise NoSuchOperatorError(
            f"{op}: there is no such operator; define it with foo_ops.library.define"
        )
    return found


def parse(name: str) -> tuple[str, str, str | None]:
    """Return the namespace, the name and the overload of ``"mylib::f.out"``; it may not exist."""
    parts = _NAME.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        raise ValueError(
            f"the name of an operator must have the form mylib::f or mylib::f.out, got {name!r}"
        )
    namespace, packet, overload = parts.groups()
    return namespace, packet, overload


def qualified(name: str | OpOverload, library: torch.library.Library) -> str:
    """Return an operator's name with the library's namespace; it may be defined later."""
    if isinstance(name, OpOverload):
        return name.name()
    if isinstance(name, str) and "::" not in name:
        name = f"{library.ns}::{name}"
    parse(name)
    return name


def short_name(operator: OpOverload) -> str:
    """Return an operator's name for messages, without namespace and overload."""
    return operator.name().partition("::")[2].partition(".")[0]


def describe(function: Callable[..., Any]) -> str:
    """Return a function's name and location, for messages."""
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

    Thus an operator's registrations end with it, when it is replaced.
    """
    name = op.name() if isinstance(op, OpOverload) else op
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
"""Backward operators, by the operators whose gradients they compute."""
VARIANTS: dict[str, str] = {}
"""Functional operators, by the in-place operators that are differentiated through them."""


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
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An argument of an operator, as a kernel takes it.

    Attributes:
        kind: one of the values of `_KINDS`; for a generator, a kernel gets a seed.
        role: "read"; "in place" for a tensor that the operator writes; "out" for a tensor after the
            ``*`` of the schema, which is only written.
        length: the number of elements that a list must have, or -1 for any.
        choices: the allowed strings, once the kernel is known.
    """

    name: str
    kind: str
    is_optional: bool
    role: str
    length: int = -1
    choices: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def schema_type(self) -> str:
        """Return the type as a schema writes it; an int may be symbolic."""
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
# By the types in schemas.
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


def parameters_of(operator: OpOverload) -> tuple[Parameter, ...]:
    """Return the parameters of an operator, for a Numba kernel.

    Raises:
        TypeError: if an argument has a type that kernels do not take.
    """
    return tuple(_parameter(operator, argument) for argument in operator._schema.arguments)


def _parameter(operator: OpOverload, argument: Argument) -> Parameter:
    type_ = argument.real_type
    is_optional = isinstance(type_, OptionalType)
    if is_optional:
        type_ = type_.getElementType()
    kind = _KINDS.get(str(type_))
    if kind is None:
        raise TypeError(
            f"{operator.name()}: {argument.name} must be Tensor, Tensor[], Scalar, float, int, "
            "bool, float[], int[], str, ScalarType or Generator, or an optional one of these, for "
            f"a kernel of Numba, got {type_}"
        )
    if kind == "generator":
        # A kernel gets a seed, whether or not a generator is given.
        return _generator(operator, argument.name)
    written = "out" if argument.kwarg_only and kind == "tensor" else "in place"
    role = written if argument.is_write else "read"
    size: int | None = argument.N  # type: ignore[attr-defined]
    length = -1 if size is None else size
    return Parameter(argument.name, kind, is_optional, role, length)


def _generator(operator: OpOverload, name: str) -> Parameter:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        raise TypeError(
            f"{operator.name()}: an operator with a generator must have the tag "
            "torch.Tag.nondeterministic_seeded, or torch.compile may merge two calls into one"
        )
    return Parameter(name, "generator", False, "read")


def functionalize_out(operator: OpOverload) -> None:
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


# ------------------------------------------------------------------------------------------- dtypes

# Name dtypes, and sort them by their kinds.


FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATING_8 = (
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
# Words for messages. A category is named if all its dtypes are accepted.
_CATEGORIES = {"integer": SIGNED + UNSIGNED, "floating-point": FLOATING, "complex": COMPLEX}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without the module: "float32"."""
    return str(dtype).removeprefix("torch.")


def require_dtypes(what: str, dtypes: object) -> tuple[torch.dtype, ...]:
    """Return an argument's dtypes as a tuple, or raise TypeError."""
    given = tuple(dtypes) if isinstance(dtypes, Iterable) else (None,)
    if not all(isinstance(dtype, torch.dtype) for dtype in given):
        raise TypeError(
            f"{what} must be a sequence of torch.dtype, such as (torch.float32,), got {dtypes!r}"
        )
    return given


def in_words(dtypes: Iterable[torch.dtype]) -> str:
    """Return the accepted dtypes in words, for a message."""
    left, words = dict.fromkeys(dtypes), []
    for word, category in _CATEGORIES.items():
        if all(dtype in left for dtype in category):
            words.append(word)
            for dtype in (*category, *(FLOATING_8 if word == "floating-point" else ())):
                left.pop(dtype, None)
    if words:
        article = "an" if words[0] == "integer" else "a"
        named = [f"{article} {_joined(words)} dtype"]
    else:
        named = []
    return _joined(named + list(map(dtype_name, left)))


def _joined(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# -------------------------------------------------------------------------------------------- texts

# Read the allowed strings from a kernel's annotations: ``mode: typing.Literal["same", "valid"]``.


def with_choices(
    operator: OpOverload,
    parameters: Sequence[Parameter],
    function: Callable[..., Any],
    inherited: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[Parameter, ...]:
    """Return the parameters of an operator, with the choices that its kernel is annotated with.

    Args:
        operator: the operator.
        parameters: all of its arguments.
        function: takes them in this order.
        inherited: the choices of arguments that are not annotated, by their names.

    Raises:
        TypeError: for a string without choices.
    """
    names = list(inspect.signature(function).parameters)
    found = []
    for parameter, name in zip(parameters, names):
        if parameter.kind == "text":
            choices = choices_in(_annotation(function, name))
            choices = choices or (inherited or {}).get(parameter.name, ())
            if not choices:
                raise TypeError(
                    f"{operator.name()}: {parameter.name} is str, so the kernel must list its "
                    f"choices: annotate {name} in {describe(function)} with "
                    'typing.Literal["a", "b"]'
                )
            parameter = dataclasses.replace(parameter, choices=choices)
        found.append(parameter)
    return (*found, *parameters[len(found) :])


def choices_in(hint: Any) -> tuple[str, ...]:
    """Return the strings of a Literal or an optional Literal; () for anything else.

    Raises:
        ValueError: for a string that a kernel's signature cannot hold.
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next((it for it in typing.get_args(hint) if it is not type(None)), None)
    texts = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    if not all(isinstance(text, str) for text in texts):
        return ()
    for text in texts:
        if not text.isprintable() or any(sign in text for sign in ",'\"\\"):
            raise ValueError(f"a choice must have no comma, quote or backslash, got {text!r}")
    return texts


def _annotation(function: Callable[..., Any], name: str) -> Any:
    hint = getattr(function, "__annotations__", {}).get(name)
    if not isinstance(hint, str):
        return hint
    # Evaluated alone: other annotations may be names that only a type checker knows.
    alone = types.SimpleNamespace(__annotations__={name: hint}, __globals__=function.__globals__)
    return typing.get_type_hints(alone, globalns=function.__globals__)[name]


# ----------------------------------------------------------------------------------------- keywords

# Translate the annotations of keywords to types of schemas.


# For messages.
KEYWORDS = (
    'float, int, bool, typing.Literal["a", "b"], int | float, list[float], list[int] or a tuple'
)

_NUMBERS = {bool: "bool", int: "SymInt", float: "float"}
_LISTS = (list, collections.abc.Sequence)


def schema_type(hint: Any) -> str | None:
    """Return the schema type for an annotation, or None if there is none."""
    parts = set(typing.get_args(hint)) if _is_union(hint) else {hint}
    mark = "?" if type(None) in parts else ""
    hints = parts - {type(None)}
    if {int, float} <= hints <= {bool, int, float, complex}:
        return f"Scalar{mark}"
    type_ = _type_of_one(hints.pop()) if len(hints) == 1 else None
    return None if type_ is None else type_ + mark


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _type_of_one(hint: Any) -> str | None:
    if choices_in(hint):
        return "str"
    if hint in _NUMBERS:
        return _NUMBERS[hint]
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in _LISTS or (origin is tuple and items[1:] == (...,)):
        size = ""
    elif origin is tuple and len(set(items)) == 1:
        size = str(len(items))
    else:
        return None
    return f"{_NUMBERS[items[0]]}[{size}]" if items[0] in (int, float) else None


def is_finite(default: Any) -> bool:
    """Return whether a default is neither inf nor NaN: a schema cannot hold those."""
    numbers = default if isinstance(default, (list, tuple)) else [default]
    return all(math.isfinite(number) for number in numbers if isinstance(number, float))


def schema_default(default: Any) -> str:
    if isinstance(default, str):
        return f'"{default}"'
    return str(list(default) if isinstance(default, tuple) else default)


# -------------------------------------------------------------------- operators without derivatives

# Make operators without derivatives raise, instead of silently losing gradients and tangents.


_AUTOGRAD_KEYS = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd")
_refusals: dict[str, Any] = {}


def refuse_derivatives(name: str, message: str, lib: torch.library.Library | None) -> None:
    """Make an operator raise NotImplementedError when differentiated, if it has no derivatives."""
    end_refusal(name)
    if not any(has_kernel_for_key(name, key) for key in _AUTOGRAD_KEYS):
        _refusals[name] = _C.refuse_to_differentiate(name, message)
        keep(_refusals[name], lib)


def end_refusal(name: str) -> None:
    """End the refusal of an operator that gets derivatives."""
    if name in _refusals:
        _refusals.pop(name).destroy()


# -------------------------------------------------------------------------------- results of Python

# Check the results of an operator's Python functions: PyTorch does not check their number.
#
# With more results than the schema has it reads memory that belongs to others; missing results are
# whatever lies on its stack.


def counted(op: str | OpOverload | torch.library.CustomOpDef, what: str, function: Any) -> Any:
    """Wrap a function to raise TypeError if its results do not match the schema.

    Args:
        op: the operator. An operator of torch.library.custom_op checks by itself.
        what: the function's role, such as "fake kernel".
        function: the function to register. An operator, or torch's fallthrough, is returned
            unchanged.
    """
    is_operator = isinstance(function, (OpOverload, OpOverloadPacket))
    is_ours = callable(function) and function is not torch.library.fallthrough_kernel
    if isinstance(op, torch.library.CustomOpDef) or is_operator or not is_ours:
        return function

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        # A kernel may be registered before its operator is defined.
        operator = find(op)
        wanted = _wanted(operator._schema.returns, result)
        if wanted is None:
            return result
        raise TypeError(f"{operator.name()}: its {what} must return {wanted}, got {_words(result)}")

    return counting


def _wanted(declared: Sequence[Argument], result: Any) -> str | None:
    """Return the expected result in words, or None if the result is right."""
    if len(declared) == 1:
        # For any other single result PyTorch's own error is good enough.
        is_right = str(declared[0].type) != "Tensor" or _may_be_tensor(result)
        return None if is_right else "a Tensor"
    if not declared:
        return None if result is None else "None"
    is_right = (
        isinstance(result, (tuple, list))
        and len(result) == len(declared)
        and all(
            str(it.type) != "Tensor" or _may_be_tensor(part) for it, part in zip(declared, result)
        )
    )
    of_tensors = all(str(it.type) == "Tensor" for it in declared)
    return None if is_right else f"{len(declared)} {'Tensors' if of_tensors else 'results'}"


def _may_be_tensor(value: Any) -> bool:
    # None stands for an undefined tensor.
    return value is None or isinstance(value, Tensor)


def _words(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"{len(result)} ({', '.join(map(_word, result))})" if result else "0"
    return _word(result)


def _word(value: Any) -> str:
    return "None" if value is None else type(value).__name__


# --------------------------------------------------------------------------- checks of fake kernels

# Let the fake kernels of tile kernels refuse the arguments that the launcher refuses.
#
# These are strings, numbers and lists, and written tensors that share memory with others. Fake
# tensors show sharing within one storage only: that two storages share memory, such as two NumPy
# arrays, shows only in addresses, and fake tensors have none.


@dataclasses.dataclass(frozen=True)
class _Values:
    """The parameters of an operator that has a tile kernel."""

    name: str
    parameters: Sequence[Parameter]
    cpp_parameters: Sequence[Any]

    def calling(
        self, fake: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the fake kernel, with checks in the order of the launcher."""
        given = {p.name: value for p, value in zip(self.parameters, args)} | kwargs
        values = [given.get(p.name) for p in self.parameters]
        _C.check_tile_values(self.name, self.cpp_parameters, values)
        results = fake(*args, **kwargs)
        if any(p.role != "read" for p in self.parameters):
            _C.check_written_memory(self.name, self.cpp_parameters, values)
        return results


# By operator, then by the kernel's dispatch key.
_values: dict[str, dict[str, _Values]] = {}


@dataclasses.dataclass(frozen=True)
class Remembered:
    """An entry of `_values`, which ends with the kernel's registration."""

    name: str
    key: str
    values: _Values

    def destroy(self) -> None:
        if _values[self.name].get(self.key) is self.values:
            del _values[self.name][self.key]


def remember_values(
    operator: OpOverload,
    key: str,
    parameters: Sequence[Parameter],
    cpp_parameters: Sequence[Any],
) -> Remembered:
    """Remember the parameters of an operator's kernel, for checks in its fake kernel."""
    values = _Values(short_name(operator), parameters, cpp_parameters)
    _values.setdefault(operator.name(), {})[key] = values
    return Remembered(operator.name(), key, values)


def _values_of(name: str, arguments: Any) -> _Values | None:
    """Return the parameters of the tile kernel that would be called; on meta, those of any."""
    kernels = _values.get(name)
    if not kernels:
        return None
    types = (tensor.device.type for tensor in tensors_in(arguments))
    key = key_for_device(next(types, "meta"))
    return next(iter(kernels.values()), None) if key == "Meta" else kernels.get(key)


def has_values(schema: FunctionSchema) -> bool:
    """Return whether a schema has arguments that may need checks."""
    types = [str(argument.real_type) for argument in schema.arguments]
    return schema.is_mutable or any(
        word in type_ for type_ in types for word in ("str", "number", "List[")
    )


def checking(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return the fake kernel, with checks of its arguments if the kernel is a tile kernel."""

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = _values_of(name, (args, kwargs))
        return fake(*args, **kwargs) if values is None else values.calling(fake, args, kwargs)

    return checked
