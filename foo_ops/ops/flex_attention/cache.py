"""Cache traced functions: a trace costs a millisecond, and most calls have a known function.

The key of a function is its code and all that it can read: closure variables, defaults and globals,
and those of the functions among these. Numbers are in the key with their values; tensors with their
kinds and sizes, and each call brings its own. A function that can read anything else, such as an
object's attributes, is traced at each call.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from foo_ops.compat import len_dispatch_stack, len_function_stack, pytree
from foo_ops.kernels.compiler.inspection import global_names, imported_names, writes_globals
from foo_ops.ops.flex_attention.programs import Place, Recorder, Step
from foo_ops.ops.flex_attention.trace import Traced, record

CAPACITY = 512
# Functions of these modules depend only on their arguments, and on state that is in the key.
MODULES = ("torch", "math", "operator", "builtins")
CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
READERS = frozenset(("globals", "locals", "vars", "eval", "exec", "__import__", "open", "input"))


class _UnknownError(Exception):
    """A function can read something that no key describes."""


@dataclasses.dataclass(frozen=True)
class _Known:
    """A trace without its captured tensors, which come from `sources` and `steps` on them."""

    traced: Traced
    captured: tuple[int, ...]
    sources: dict[int, int]
    created: dict[int, Tensor]
    steps: tuple[Step, ...]

    def call(self, tensors: list[Tensor]) -> Traced:
        """Return the trace with the tensors of a call."""
        values = {place: tensors[number] for place, number in self.sources.items()}
        values |= self.created
        for step in self.steps:
            args, kwargs = pytree.tree_map_only(
                Place, values.__getitem__, (step.arguments, step.options)
            )
            results = pytree.tree_leaves(step.function(*args, **kwargs))
            values |= dict(zip(step.results, results, strict=True))
        traced = self.traced
        return Traced(
            *(traced.score_mod, traced.mask_mod, traced.backward),
            *([values[it] for it in self.captured], traced.numbers, traced.integers),
        )


_known: dict[tuple[Any, ...], _Known] = {}
_lock = threading.Lock()


def traced(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, query: Tensor
) -> Traced:
    """Return the programs of a score_mod and a mask_mod, from the cache or by a trace."""
    described = _describe(score_mod, mask_mod, query)
    if described is None:
        return record(score_mod, mask_mod, query)[0]
    key, tensors = described
    known = _known.get(key)
    if known is not None:
        return known.call(tensors)
    traced, recorder = record(score_mod, mask_mod, query)
    known = _made_known(traced, recorder, tensors)
    if known is not None:
        with _lock:
            while len(_known) >= CAPACITY:
                del _known[next(iter(_known))]
            _known[key] = known
    return traced


def _made_known(traced: Traced, recorder: Recorder, tensors: list[Tensor]) -> _Known | None:
    """Return the cache entry of a trace; None if it depends on values or on unknown tensors."""
    if recorder.reads_values:
        return None
    needed = {id(it) for it in traced.captured}
    steps = []
    for step in reversed(recorder.steps):
        if needed.intersection(step.results):
            steps.append(step)
            needed.difference_update(step.results)
            leaves = pytree.tree_leaves((step.arguments, step.options))
            needed.update(it for it in leaves if isinstance(it, Place))
    created = {it: recorder.created[it] for it in needed if it in recorder.created}
    sources = {id(it): number for number, it in enumerate(tensors) if id(it) in needed}
    if needed - created.keys() - sources.keys():
        return None
    captured = tuple(id(it) for it in traced.captured)
    empty = dataclasses.replace(traced, captured=[])
    return _Known(empty, captured, sources, created, tuple(reversed(steps)))


def _describe(*arguments: Any) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Return the key of a call, and the tensors that its functions can read."""
    score_mod, mask_mod, query = arguments
    if len_function_stack() or len_dispatch_stack():
        return None
    walk = _Walk()
    around = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    walk.key.extend((*around, torch.get_default_dtype(), query.dtype, query.device))
    try:
        walk.value(score_mod)
        walk.value(mask_mod)
    except _UnknownError:
        return None
    return tuple(walk.key), walk.tensors


class _Walk:
    """Builds the key, by a walk through all that functions can read."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}

    def value(self, value: Any) -> None:
        """Add a value to the key."""
        kind = type(value)
        if kind in CONSTANTS:
            # The repr tells 0.0 from -0.0, and that of a NaN is equal to itself.
            self.key.append((kind, repr(value)))
        elif kind is Tensor or kind is torch.nn.Parameter:
            self._tensor(value)
        elif kind is types.FunctionType:
            self._function(value)
        elif kind in (tuple, list):
            self.key.append((kind, len(value)))
            for item in value:
                self.value(item)
        elif kind is functools.partial:
            self.key.append((kind, tuple(value.keywords)))
            self.value(value.func)
            self.value([*value.args, *value.keywords.values()])
        elif _is_pure(value):
            self.key.append(value)
        else:
            raise _UnknownError

    def _is_new(self, value: Any) -> bool:
        """Add the number of a value to the key, and return whether the value is new."""
        number = self._seen.setdefault(id(value), len(self._seen))
        self.key.append(number)
        return number == len(self._seen) - 1

    def _tensor(self, tensor: Tensor) -> None:
        if not self._is_new(tensor):
            return
        if tensor.__dict__ or tensor.layout != torch.strided:
            raise _UnknownError
        self.tensors.append(tensor)
        self.key.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.device))
        self.key.append((tensor.requires_grad, type(tensor)))

    def _function(self, function: types.FunctionType) -> None:
        if not self._is_new(function):
            return
        names = _readable(function.__code__)
        is_torch = _is_of_modules(function.__module__)
        if names is None or (function.__dict__ and not is_torch):
            raise _UnknownError
        self.key.append(function.__code__)
        self._values(function.__defaults__ or ())
        self._values((function.__kwdefaults__ or {}).values())
        try:
            self._values(it.cell_contents for it in function.__closure__ or ())
        except ValueError:
            raise _UnknownError from None
        if not is_torch:
            self._globals(function.__globals__, names)

    def _globals(self, namespace: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            if name in namespace:
                self.value(namespace[name])
            else:
                self.key.append(name)

    def _values(self, values: Iterable[Any]) -> None:
        for value in values:
            self.value(value)


def _is_pure(value: Any) -> bool:
    """Whether a value is a module, a class or a C function that depends on its arguments alone."""
    if isinstance(value, types.ModuleType):
        return _is_of_modules(value.__name__)
    if isinstance(value, type):
        return _is_of_modules(value.__module__)
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, (types.ModuleType, type, types.NoneType))
    return False


def _is_of_modules(name: str | None) -> bool:
    return name is not None and name.partition(".")[0] in MODULES


@functools.cache
def _readable(code: types.CodeType) -> tuple[str, ...] | None:
    """Return the names of the globals that a function reads; None if it does more with them."""
    names = global_names(code)
    if names & READERS or imported_names(code) or writes_globals(code):
        return None
    return tuple(sorted(names))
