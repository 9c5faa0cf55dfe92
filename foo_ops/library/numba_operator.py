"""`numba_op`: an operator out of one annotated function."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from foo_ops.library.autograd import register_variant_autograd
from foo_ops.library.elementwise import (
    COMPLEX,
    FLOATING,
    SIGNED,
    UNSIGNED,
    Backward,
    elementwise_kernel,
)
from foo_ops.library.kernels import describe, register_kernel

# What an annotation of an element means, from the narrowest.
_DTYPES = {
    bool: (torch.bool,),
    int: (*SIGNED, *UNSIGNED),
    float: FLOATING,
    complex: COMPLEX[1:],
}
_ORDER = list(_DTYPES)
_SCALARS = (bool, int, float)


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
) -> Callable[[Callable[..., Any]], torch._ops.OpOverloadPacket]: ...


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
) -> torch._ops.OpOverloadPacket: ...


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
    """Make an elementwise operator of an annotated function of scalars.

    It defines ``name``, ``name_`` where the result can take the first tensor's place, and
    ``name.out``, with kernels, fake kernels and gradients; see `elementwise_kernel`.

    - An argument without a default is a tensor; ``float``, ``int``, ``bool`` or ``complex`` says of
      which numbers. Those of the widest kind are promoted to a common dtype, which is that of the
      result, too; others keep their own: of ``(mask: bool, x: float)`` mask is a bool.
    - An argument with a default is a number: a keyword of the operator, of type float, int or bool,
      or optional (``float | None``).
    - What is returned is annotated alike; ``bool`` gives torch.bool, ``tuple[float, bool]`` two
      tensors.

    Args:
        name: such as ``"mylib::relu6"``.
        function: the function; without it this is a decorator.
        backward: the gradients, see `elementwise_kernel`.
        dtypes: the dtypes that are taken, instead of all that the annotations say.
        device_types: "cpu", "foo" or both.
        lib: the operator ends with it; without it, with the process.

    Returns:
        ``torch.ops.mylib.relu6``.

    Raises:
        TypeError: for a missing annotation, or one of another type.

    Example:
        >>> @foo_ops.library.numba_op("mylib::relu6", backward=lambda g, x: g if 0 < x < 6 else 0.0)
        ... def relu6(x: float) -> float:
        ...     return min(max(x, 0.0), 6.0)
        >>> relu6(torch.tensor([-1.0, 3.0, 7.0]))
        tensor([0., 3., 6.])
    """

    def make(function: Callable[..., Any]) -> torch._ops.OpOverloadPacket:
        operator = _Operator(name, function)
        kernel = elementwise_kernel(
            function,
            dtypes=operator.dtypes if dtypes is None else dtypes,
            result_type=[operator.result_type(result) for result in operator.results],
            backward=backward,
            own_dtypes=operator.own_dtypes,
        )
        for qualified, schema, tags in operator.schemas():
            _define(qualified, schema, tags, lib)
            register_kernel(qualified, device_types, kernel, lib=lib)
            if qualified != name and backward is not None:
                register_variant_autograd(qualified, lib=lib)
        namespace, _, packet = name.partition("::")
        return getattr(getattr(torch.ops, namespace), packet)

    return make if function is None else make(function)


def _define(
    name: str, schema: str, tags: Sequence[torch.Tag], lib: torch.library.Library | None
) -> None:
    if lib is None:
        torch.library.define(name, schema, tags=tags)
    else:
        lib.define(name.partition("::")[2] + schema, tags=tags)


class _Operator:
    """What the annotations of a function say."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        self._hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        self._tensors = [p.name for p in parameters if p.default is p.empty]
        self._scalars = [p for p in parameters if p.default is not p.empty]
        if not self._tensors:
            raise self._error("needs an argument without a default, which is a tensor")
        self._widest = max((self._element(name) for name in self._tensors), key=_ORDER.index)
        self.dtypes = _DTYPES[self._widest]
        elements = {name: self._element(name) for name in self._tensors}
        self.own_dtypes = {
            name: _DTYPES[element]
            for name, element in elements.items()
            if element is not self._widest
        }
        self.results = self._results()

    def _error(self, message: str) -> TypeError:
        return TypeError(f"{self.name}: {describe(self._function)} {message}")

    def _element(self, name: str) -> type:
        hint = self._hints.get(name)
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

    def result_type(self, result: type) -> torch.dtype | None:
        """None for the common dtype of the tensors."""
        if result is self._widest:
            return None
        wider = {int: torch.int64, float: torch.get_default_dtype(), complex: torch.complex64}
        return wider.get(result, torch.bool)

    def _keywords(self) -> list[str]:
        return [self._keyword(parameter) for parameter in self._scalars]

    def _keyword(self, parameter: inspect.Parameter) -> str:
        hint = self._hints.get(parameter.name)
        parts = typing.get_args(hint) if _is_union(hint) else (hint,)
        plain = [part for part in parts if part is not type(None)]
        if len(plain) != 1 or plain[0] not in _SCALARS:
            raise self._error(
                f"must annotate {parameter.name} with float, int or bool, or one of these and "
                f"None, got {_written(hint)}"
            )
        mark = "?" if len(parts) > 1 else ""
        return f"{plain[0].__name__}{mark} {parameter.name}={parameter.default}"

    def schemas(self) -> list[tuple[str, str, tuple[torch.Tag, ...]]]:
        """Names, schemas and tags of the operator and its variants."""
        keywords = self._keywords()
        count = len(self.results)
        tensors = [f"Tensor {name}" for name in self._tensors]
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


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _written(hint: Any) -> str:
    return "nothing" if hint is None else getattr(hint, "__name__", str(hint))


def _schema(tensors: Sequence[str], keywords: Sequence[str], results: Sequence[str]) -> str:
    arguments = [*tensors, *(["*", *keywords] if keywords else [])]
    returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"({', '.join(arguments)}) -> {returned}"
