"""Provide `numba_op`, which makes an operator out of one annotated function."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch

from foo_ops.compat import OpOverloadPacket
from foo_ops.library.elementwise import (
    Backward,
    ElementwiseKernel,
    elementwise_kernel,
    refuse_other_backward,
    register_variant_autograd,
)
from foo_ops.library.kernels import register_kernel, require_function
from foo_ops.library.operators import (
    COMPLEX,
    FLOATING,
    KEYWORDS,
    SIGNED,
    UNSIGNED,
    choices_in,
    describe,
    is_finite,
    require_dtypes,
    schema_default,
    schema_type,
)

# The dtypes for the annotation of an element, from the narrowest.
_DTYPES = {
    bool: (torch.bool,),
    int: (*SIGNED, *UNSIGNED),
    float: FLOATING,
    complex: COMPLEX[1:],
}
_ORDER = list(_DTYPES)


@overload
def numba_op(
    name: str,
    function: None = None,
    /,
    *,
    backward: Backward | None = ...,
    dtypes: Sequence[torch.dtype] | None = ...,
    device_types: str | Sequence[str] = ...,
    lib: torch.library.Library | None = ...,
) -> Callable[[Callable[..., Any]], OpOverloadPacket]: ...


@overload
def numba_op(
    name: str,
    function: Callable[..., Any],
    /,
    *,
    backward: Backward | None = ...,
    dtypes: Sequence[torch.dtype] | None = ...,
    device_types: str | Sequence[str] = ...,
    lib: torch.library.Library | None = ...,
) -> OpOverloadPacket: ...


def numba_op(
    name: str,
    function: Callable[..., Any] | None = None,
    /,
    *,
    backward: Backward | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device_types: str | Sequence[str] = ("cpu", "foo"),
    lib: torch.library.Library | None = None,
) -> Any:
    """Make an elementwise operator from an annotated function of scalars.

    It defines ``name``, ``name_`` if the result can take the first tensor's place, and
    ``name.out``, with kernels, fake kernels and gradients; see `elementwise_kernel`.

    - An argument without a default is a tensor, annotated with the kind of its numbers: ``float``,
      ``int``, ``bool`` or ``complex``, or ``float | None`` if it may be missing. Tensors of the
      widest kind are promoted to a common dtype, which is also that of the result; others keep
      their own: in ``(mask: bool, x: float)`` mask is a bool.
    - An argument with a default is a keyword of the operator: ``float``, ``int``, ``bool``, a
      string (``typing.Literal["same", "valid"]``), a list (``list[float]``, ``tuple[int, int]``), a
      number in the type of the elements (``int | float``), or one of these or None
      (``float | None``).
    - The return value is annotated likewise; ``bool`` gives torch.bool, ``tuple[float, bool]`` two
      tensors.

    Args:
        name: such as ``"mylib::relu6"``. If numba_op has defined it before, that operator is
            replaced, as in a notebook, or when a module is loaded again.
        function: the function; if omitted, returns a decorator.
        backward: the gradients, see `elementwise_kernel`.
        dtypes: the accepted dtypes, instead of all that the annotations allow.
        device_types: "cpu", "foo" or both.
        lib: the operator ends with this library; by default, with the process.

    Returns:
        ``torch.ops.mylib.relu6``.

    Raises:
        TypeError: for a missing annotation, one of another type, and for arguments that an operator
            cannot have.
        ValueError: for a name without a namespace, with an overload, or that is no string.

    Example:
        >>> @foo_ops.library.numba_op("mylib::relu6", backward=lambda g, x: g if 0 < x < 6 else 0.0)
        ... def relu6(x: float) -> float:
        ...     return min(max(x, 0.0), 6.0)
        >>> relu6(torch.tensor([-1.0, 3.0, 7.0]))
        tensor([0., 3., 6.])
    """

    _check_name(name)

    def make(function: Callable[..., Any]) -> OpOverloadPacket:
        _check_functions(name, function, backward)
        operator = _Operator(name, getattr(function, "py_func", function))
        schemas = operator.schemas()
        taken = operator.dtypes if dtypes is None else require_dtypes(f"{name}: dtypes", dtypes)
        kernel = elementwise_kernel(
            function,
            dtypes=taken,
            result_type={
                dtype: [operator.result_type(result, dtype) for result in operator.results]
                for dtype in taken
            },
            backward=backward,
            own_dtypes=operator.own_dtypes,
        )
        refuse_other_backward(name, backward)
        owner = _own_library(name) if lib is None else lib
        for qualified, schema, tags in schemas:
            owner.define(qualified.partition("::")[2] + schema, tags=tags)
            register_kernel(qualified, device_types, kernel, lib=owner)
            if qualified != name and backward is not None:
                register_variant_autograd(qualified, lib=owner)
        namespace, _, packet = name.partition("::")
        return getattr(getattr(torch.ops, namespace), packet)

    return make if function is None else make(function)


def _check_name(name: object) -> None:
    if inspect.isfunction(name):
        raise TypeError(
            'numba_op must be given the name of the operator, @numba_op("mylib::f"), got '
            f"{describe(name)}"
        )
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", name):
        raise ValueError(
            f"numba_op: the name of the operator must have the form mylib::f, got {name!r}"
        )


def _check_functions(name: str, function: object, backward: object) -> None:
    require_function(f"{name}: numba_op must be given", function)
    if not isinstance(backward, (ElementwiseKernel, type(None))):
        require_function(f"{name}: backward must be", backward)


# The libraries of operators that were defined without ``lib``, by name.
_libraries: dict[str, torch.library.Library] = {}


def _own_library(name: str) -> torch.library.Library:
    """Make a library for an operator, and destroy that of an earlier operator of this name."""
    if name in _libraries:
        _libraries.pop(name)._destroy()
    _libraries[name] = torch.library.Library(name.partition("::")[0], "FRAGMENT")
    return _libraries[name]


class _Operator:
    """An operator, as the annotations of its function describe it."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        self._hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        self._check_parameters(parameters)
        self._tensors = [p.name for p in parameters if p.default is p.empty]
        self._scalars = [p for p in parameters if p.default is not p.empty]
        if not self._tensors:
            raise self._error("must take at least one tensor, an argument without a default")
        self._widest = max((self._element(name) for name in self._tensors), key=_ORDER.index)
        self.dtypes = _DTYPES[self._widest]
        elements = {name: self._element(name) for name in self._tensors}
        self.own_dtypes = {
            name: _DTYPES[element]
            for name, element in elements.items()
            if element is not self._widest
        }
        self.results = self._results()

    def _check_parameters(self, parameters: Iterable[inspect.Parameter]) -> None:
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise self._error(f"must take a fixed number of arguments, got {parameter}")
            if re.fullmatch(r"out\d*", parameter.name):
                raise self._error(
                    f"must not have an argument {parameter.name}, since {self.name}.out has one"
                )

    def _error(self, message: str) -> TypeError:
        return TypeError(f"{self.name}: {describe(self._function)} {message}")

    def _is_optional(self, name: str) -> bool:
        return type(None) in typing.get_args(self._hints.get(name))

    def _element(self, name: str) -> type:
        hint = self._hints.get(name)
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        if self._is_optional(name) and len(parts) == 1:
            hint = parts[0]
        if hint not in _DTYPES:
            raise self._error(
                f"must annotate {name} with float, int, bool or complex, got {_written(hint)}"
            )
        return hint

    def _results(self) -> list[type]:
        hint = self._hints.get("return")
        results = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
        for result in results:
            if result not in _DTYPES:
                raise self._error(
                    "must annotate what it returns with float, int, bool, complex or a tuple of "
                    f"these, got {_written(result)}"
                )
        return list(results)

    def result_type(self, result: type, common: torch.dtype) -> torch.dtype:
        """Return the dtype of a result for a common dtype of the tensors."""
        if result is self._widest:
            return common
        if result is float and self._widest is complex:
            return common.to_real()
        others = {int: torch.int64, float: torch.get_default_dtype(), complex: torch.complex64}
        return others.get(result, torch.bool)

    def _keywords(self) -> list[str]:
        return [self._keyword(parameter) for parameter in self._scalars]

    def _keyword(self, parameter: inspect.Parameter) -> str:
        hint = self._hints.get(parameter.name)
        type_ = schema_type(hint)
        if type_ is None:
            raise self._error(
                f"must annotate {parameter.name} with {KEYWORDS}, or one of these and None, "
                f"got {_written(hint)}"
            )
        default = parameter.default
        if not is_finite(default):
            raise self._error(
                f"must give {parameter.name} a finite default, since schemas have no other, got "
                f"{default}; write float | None = None instead"
            )
        if type_.startswith("str") and default not in (None, *choices_in(hint)):
            raise self._error(
                f"must give {parameter.name} one of its choices as default, got {default!r}"
            )
        return f"{type_} {parameter.name}={schema_default(default)}"

    def schemas(self) -> list[tuple[str, str, tuple[torch.Tag, ...]]]:
        """Return names, schemas and tags of the operator and its variants."""
        keywords = self._keywords()
        count = len(self.results)
        tensors = [f"Tensor{'?' * self._is_optional(name)} {name}" for name in self._tensors]
        outs = [f"Tensor({chr(97 + i)}!) out{i if count > 1 else ''}" for i in range(count)]
        written = [f"Tensor({chr(97 + i)}!)" for i in range(count)]
        compliant = torch.Tag.pt2_compliant_tag
        schemas: list[tuple[str, str, tuple[torch.Tag, ...]]] = [
            (self.name, _schema(tensors, keywords, ["Tensor"] * count), (compliant,)),
            (f"{self.name}.out", _schema(tensors, keywords + outs, written), (compliant,)),
        ]
        if self.results == [self._widest] and self._element(self._tensors[0]) is self._widest:
            first = f"Tensor(a!) {self._tensors[0]}"
            in_place = _schema([first, *tensors[1:]], keywords, written)
            schemas.append((f"{self.name}_", in_place, (compliant, torch.Tag.inplace)))
        return schemas


def _written(hint: Any) -> str:
    return "nothing" if hint is None else getattr(hint, "__name__", str(hint))


def _schema(tensors: Sequence[str], keywords: Sequence[str], results: Sequence[str]) -> str:
    arguments = [*tensors, *(["*", *keywords] if keywords else [])]
    returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"({', '.join(arguments)}) -> {returned}"
