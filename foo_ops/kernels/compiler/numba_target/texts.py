"""Texts as arguments of kernels: constants that leave nothing in compiled code.

The text is part of the argument's type. Comparing it with a constant is a constant itself, so that
one branch of ``if mode == "same":`` is removed, and not compiled.
"""

from __future__ import annotations

import operator
from typing import Any

from numba.core import ir, types
from numba.core.ir_utils import get_definition, guard
from numba.extending import models, register_model

_COMPARISONS = (operator.eq, operator.ne, operator.contains, operator.is_, operator.is_not)


class Text(types.Type):
    """A text that is known when the kernel is compiled."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"Text({text!r})")


register_model(Text)(models.OpaqueModel)


class _Unknown:
    """Marks a value that is not a text, None or a tuple of these."""


_UNKNOWN = _Unknown()
# Marks an argument that is neither a text nor None.
_GIVEN = _Unknown()


def fold_comparisons(state: Any) -> None:
    """Replace comparisons of texts, and of arguments with None, by their results."""
    for block in state.func_ir.blocks.values():
        for assignment in block.find_insts(ir.Assign):
            result = _result(state, assignment.value)
            if result is not None:
                assignment.value = ir.Const(result, assignment.loc)
                state.func_ir._definitions[assignment.target.name] = [assignment.value]


def _result(state: Any, expression: Any) -> bool | None:
    if not isinstance(expression, ir.Expr):
        return None
    if expression.op == "unary" and expression.fn in (operator.not_, "not"):
        operand = guard(get_definition, state.func_ir, expression.value)
        is_constant = isinstance(operand, ir.Const) and isinstance(operand.value, bool)
        return not operand.value if is_constant else None
    if expression.op != "binop" or expression.fn not in _COMPARISONS:
        return None
    left, right = (_known(state, side) for side in (expression.lhs, expression.rhs))
    if expression.fn in (operator.is_, operator.is_not) and _GIVEN in (left, right):
        return expression.fn is operator.is_not if None in (left, right) else None
    has_text = any(isinstance(side, (str, tuple)) for side in (left, right))
    is_known = not any(isinstance(side, _Unknown) for side in (left, right))
    return bool(expression.fn(left, right)) if has_text and is_known else None


def _known(state: Any, variable: ir.Var) -> Any:
    """Return the constant text, None or tuple of these that a variable holds, or a marker."""
    definition = guard(get_definition, state.func_ir, variable)
    if isinstance(definition, ir.Arg):
        type_ = state.args[definition.index]
        if isinstance(type_, Text):
            return type_.text
        if isinstance(type_, (types.Optional, types.Omitted)):
            return _UNKNOWN
        return None if isinstance(type_, types.NoneType) else _GIVEN
    if isinstance(definition, ir.Expr) and definition.op == "build_tuple":
        items = tuple(_known(state, item) for item in definition.items)
    elif isinstance(definition, (ir.Const, ir.Global, ir.FreeVar)):
        if definition.value is None or isinstance(definition.value, str):
            return definition.value
        items = definition.value if isinstance(definition.value, tuple) else (_UNKNOWN,)
    else:
        return _UNKNOWN
    return items if all(it is None or isinstance(it, str) for it in items) else _UNKNOWN
