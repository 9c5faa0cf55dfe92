"""Let the floating-point options of operators vary in compiled programs.

Dynamo makes a number symbolic if it changes from call to call, and passes it in a tensor. But a
schema's ``float`` holds no symbol: PyTorch would compile a program for each value. So a call with
such a number becomes a call of a second operator, made on first use. It takes the same arguments,
with the number that the program was traced with, and the actual number in a tensor,
``<argument>_number``, which its kernel reads. Fake kernels see only the traced number; a guard
checks whether the number is positive.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops._process import after_import
from foo_ops.compat import DYNAMO, OpOverload, OpOverloadPacket, peek_interpreter_stack
from foo_ops.library.operators import BACKWARDS, VARIANTS, find, keep
from foo_ops.library.rules import AUTOCASTS, register_autocast

if TYPE_CHECKING:
    from foo_ops.compat import VariableTracker

NAMESPACE = "foo_numbers"
SUFFIX = "_number"
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("float", "Optional[float]"), (torch.SymFloat, torch.SymInt)),
    **dict.fromkeys(("number", "Optional[number]"), (torch.SymFloat,)),
}

SEEDED: dict[str, str] = {}
"""Operators that take a seed, by the operators that draw it themselves for dropout."""

# The operators whose numbers may vary, and the second operators that were made for them.
_names: set[str] = set()
_made: dict[str, _Made] = {}


def let_numbers_vary(name: str, schema: str) -> None:
    """Register an operator that may have floating-point options in Dynamo, once it is loaded."""
    if not re.search(r"\b(float|Scalar)\b", schema):
        return
    if not _names:
        after_import(DYNAMO, _tell_dynamo)
    _names.add(name)
    if name in _made:
        # The name belongs to a new operator now.
        _made.pop(name).destroy()
    if _handlers:
        _tell(name)


class _Made:
    """The second operator for an operator, with numbers in tensors.

    Args:
        operator: the first operator.
        results: names for its results, if it computes gradients and they have no names.
    """

    def __init__(self, operator: OpOverload, results: list[str] | None = None) -> None:
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        self._of, self._backward = operator, None
        name = re.sub(r"\W+", "__", operator.name()) + "__gradients" * (results is not None)
        self._library.define(self._schema(name, results), tags=operator.tags)
        self.operator: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        for key in ("CPU", "PrivateUse1"):
            made = _C.register_tensor_numbers(self.operator.name(), key, operator.name())
            keep(made, self._library)
        torch.library.register_fake(self.operator, self._fake, lib=self._library)
        for device_type, (dtype, uncast) in AUTOCASTS.get(operator.name(), {}).items():
            register_autocast(self.operator, device_type, dtype, uncast=uncast, lib=self._library)
        backward = BACKWARDS.get(operator.name())
        if backward is not None:
            tensors = [it.name for it in operator._schema.arguments if "Tensor" in str(it.type)]
            self._backward = _Made(find(backward), [f"grad_{it}" for it in tensors])
            made = _C.register_backward_operator(
                self.operator.name(),
                self._backward.operator.name(),
                _C.Tangents.not_implemented,
            )
            keep(made, self._library)
        elif operator.name() in VARIANTS:
            _with_tensor_numbers(find(VARIANTS[operator.name()]))
            keep(_C.register_variant_autograd(self.operator.name()), self._library)

    def _schema(self, name: str, results: list[str] | None) -> str:
        schema = self._of._schema
        arguments, _, returned = str(schema).partition("(")[2].rpartition(") -> ")
        has_star = any(it.kwarg_only for it in schema.arguments)
        numbers = [f"Tensor? {it}{SUFFIX}=None" for it in numbers_of(self._of)]
        taken = [arguments, *(["*"] if numbers and not has_star else []), *numbers]
        if results is not None and not any(it.name for it in schema.returns):
            types = returned.strip("()").split(", ")
            returned = f"({', '.join(map(' '.join, zip(types, results)))})"
        return f"{name}({', '.join(taken)}) -> {returned}"

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        given = {name: it for name, it in kwargs.items() if name not in self._numbers}
        return self._of(*args, **given)

    @property
    def _numbers(self) -> set[str]:
        return {f"{it}{SUFFIX}" for it in numbers_of(self._of)}

    def destroy(self) -> None:
        if self._backward is not None:
            self._backward.destroy()
        self._library._destroy()


def numbers_of(operator: OpOverload) -> dict[str, tuple[type, ...]]:
    """Return the arguments that may be floating-point numbers, and the symbols they cannot hold.

    A Scalar can hold the symbol of an integer.
    """
    types = {it.name: str(it.real_type) for it in operator._schema.arguments}
    return {name: _TYPES[it] for name, it in types.items() if it in _TYPES}


def _with_tensor_numbers(operator: OpOverload) -> OpOverload:
    name = operator.name()
    if name not in _made:
        _made[name] = _Made(operator)
    return _made[name].operator


# ----------------------------------------------------------------------------------------- Dynamo

# Dynamo's handlers, by function; empty until Dynamo is loaded.
_handlers: list[dict[Any, Any]] = []


def _tell_dynamo() -> None:
    from foo_ops.compat import handlers_of_functions

    _handlers.append(handlers_of_functions())
    for name in _names:
        _tell(name)


def _tell(name: str) -> None:
    try:
        operator = find(name)
    except AttributeError:
        # The operator has ended with its library.
        return
    for function in (operator, operator._overloadpacket):
        _handlers[0][function] = _handle


def _handle(called: Any, tx: Any, *args: Any, **kwargs: Any) -> VariableTracker | None:
    """Trace a call with tensors in place of numbers that vary; return None for an ordinary call."""
    from foo_ops.compat import ConstantVariable, FunctionVariable, VariableTracker

    operator = called.value
    if isinstance(operator, OpOverloadPacket):
        operator = operator.default
    names = [it.name for it in operator._schema.arguments]
    given: dict[str, Any] = dict(zip(names, args)) | kwargs
    varying = [
        name
        for name, types in numbers_of(operator).items()
        if name in given and _varies(given[name], types)
    ]
    if not varying or not given.keys() <= set(names) or not _is_ordinary(tx, operator, given):
        return None
    traced = {name: _traced(given[name].sym_num) for name in varying}
    for name, number in traced.items():
        in_tensor = VariableTracker.build(tx, _in_tensor)
        given[f"{name}{SUFFIX}"] = in_tensor.call_function(tx, [given[name]], {})
        given[name] = ConstantVariable.create(number)
    if operator.name() in SEEDED:
        operator = find(SEEDED[operator.name()])
        if "dropout_p" in given and given["dropout_p"].as_python_constant() > 0.0:
            draw = VariableTracker.build(tx, _draw_seed)
            given["seed"] = draw.call_function(tx, [given[names[0]]], {})
    function = FunctionVariable(_with_tensor_numbers(operator))
    return function.call_function(tx, *_by_place(operator, given))


def _by_place(operator: OpOverload, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments as positional ones, up to the first that is missing, and keywords."""
    positional = []
    for argument in operator._schema.arguments:
        if argument.kwarg_only or argument.name not in given:
            break
        positional.append(given.pop(argument.name))
    return positional, given


def _varies(variable: Any, types: tuple[type, ...]) -> bool:
    """Return whether a number is symbolic, is no default, and has a known value in this call."""
    number: Any = getattr(variable, "sym_num", None)
    if not isinstance(number, types):
        return False
    symbol: Any = number
    return symbol.node.has_hint() and not _is_default(variable)


def _is_default(variable: Any) -> bool:
    """Return whether a number is a function's default, which dynamic=True makes symbolic, too."""
    from foo_ops.compat import DefaultsSource

    # Dynamo reads a symbolic number from a tensor that it has made for it.
    given = [it.meta.get("grapharg") for it in variable.as_proxy().node.all_input_nodes]
    return any(it is not None and isinstance(it.source, DefaultsSource) for it in given)


def _traced(number: Any) -> float:
    """Return the number that a program is traced with; guard whether it is positive."""
    bool(number > 0)
    return float(number.node.hint)


def _is_ordinary(tx: Any, operator: OpOverload, given: dict[str, Any]) -> bool:
    """Return whether the second operator can replace an operator in a call."""
    from foo_ops.compat import FakeTensor

    is_transformed = peek_interpreter_stack() is not None
    has_out = any(it.is_out for it in operator._schema.arguments)
    if tx.export or is_transformed or has_out:
        return False
    tensors = [it.as_proxy().node.meta["example_value"] for it in _tensors_in(given.values())]
    is_recorded = torch.is_grad_enabled() and any(it.requires_grad for it in tensors)
    name = operator.name()
    has_gradients = VARIANTS.get(name, SEEDED.get(name, name)) in BACKWARDS
    return all(type(it) is FakeTensor for it in tensors) and (has_gradients or not is_recorded)


def _tensors_in(variables: Any) -> list[Any]:
    return [it for it in variables if it.is_tensor()]


def _in_tensor(number: float) -> Tensor:
    """Return a number in a tensor, as a product, which PyTorch does not turn into a constant."""
    return torch.ones((), dtype=torch.float64) * number


def _draw_seed(query: Tensor) -> Tensor:
    """Draw a seed as operators that need gradients do (csrc/ops/attention/arguments.cpp)."""
    return torch.randint(torch.iinfo(torch.int64).max, (1,), device=query.device)
