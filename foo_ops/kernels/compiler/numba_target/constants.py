"""Constants of kernels: numbers, which must not promote, and texts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
from numba.core import errors, ir, types
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.ir_utils import get_definition, guard
from numba.extending import intrinsic, models, register_model

from foo_ops.kernels.compiler.python_math import MATH, round_whole

# -------------------------------------------------------------------------------------------- texts

# Texts as arguments of kernels leave nothing in compiled code. The text is part of the argument's
# type. Comparing it with a constant is a constant itself, so that one branch of ``if mode ==
# "same":`` is removed, and not compiled.


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


# ------------------------------------------------------------------------------------------ numbers

# In float32, ``x * 0.5`` is computed in float32, as in torch.
#
# To Numba a constant is an int64 or a float64, and ``float32 * int64`` a float64, as in NumPy 1. In
# a kernel that would halve the lanes of a vector, and add conversions. Constant expressions are
# computed here, so that ``x * math.sqrt(0.5)`` and ``x * (A / 3)`` behave the same. Intermediate
# values are float64 or int, as in Python.
#
# Powers with constant integer exponents are replaced, too: ``x ** 2`` becomes a product, and ``x **
# -2`` a product of 1 / x. Numba's dispatch here does not see constants, and would use a loop.


_PARTS = {types.complex64: types.float32, types.float32: types.float32}
# Operators of integers only.
_BITWISE = (
    *(operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
    *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
)
# Exponents whose products take at most six multiplications.
_EXPONENTS = (*range(-16, 0), *range(1, 17))
# Functions that compute the result of constant arguments.
_FOLDED: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(math, name): function for name, function in MATH.items()},
    **{function: function for function in (abs, float, int, max, min)},
    pow: operator.pow,
    round: lambda number, *digits: round(number, *digits) if digits else round_whole(number),
}


def let_fold(function: Any, evaluate: Callable[..., Any]) -> None:
    """Let ``evaluate`` compute a kernel's function if all its arguments are constants."""
    _FOLDED[function] = evaluate


@intrinsic
def _adapt(typing_context, constant, other):
    """Convert a constant to the type of the other operand, if that is narrower."""
    own = types.unliteral(constant)
    type_ = _PARTS.get(other, own)

    def generate(context, builder, signature, args):
        return context.cast(builder, args[0], own, type_)

    return type_(own, other), generate


def _raised(typing_context: Any, base: types.Type, number: types.Type, exponent: int) -> Any:
    """Raise a number to a power, by squaring it or its inverse."""

    def result_of(operation: Any, type_: types.Type) -> Any:
        return typing_context.resolve_function_type(operation, (type_,) * 2, {}).return_type

    # The inverse of a large power could be too small where the power of the inverse is not.
    factor = result_of(operator.truediv, number) if exponent < 0 else number
    product = result_of(operator.mul, factor)

    def generate(context, builder, signature, args):
        multiply = context.get_function(operator.mul, product(product, product))
        square = context.cast(builder, args[0], base, product)
        if exponent < 0:
            divide = context.get_function(operator.truediv, product(product, product))
            one = context.cast(builder, context.get_constant(types.int64, 1), types.int64, product)
            square = divide(builder, (one, square))
        result, rest = None, abs(exponent)
        while rest:
            if rest & 1:
                result = square if result is None else multiply(builder, (result, square))
            rest >>= 1
            square = multiply(builder, (square, square)) if rest else square
        return result

    return product, generate


def _require_number(base: types.Type, exponent: types.Type) -> None:
    """Refuse operands that are not numbers, or an exponent that is not a literal.

    Numba retries with literal types.
    """
    if not isinstance(base, (types.Number, types.Boolean)) or not hasattr(
        exponent, "literal_value"
    ):
        raise errors.TypingError(f"** takes numbers, got {base}")


@intrinsic(prefer_literal=True)
def _power(typing_context, base, exponent):
    """Raise a number to a constant power."""
    _require_number(base, exponent)
    number = types.unliteral(base)
    product, generate = _raised(typing_context, number, number, exponent.literal_value)
    return product(number, exponent), generate


@intrinsic(prefer_literal=True)
def _power_as_float(typing_context, base, exponent):
    """Raise a number to a constant power; integers are converted to float64."""
    _require_number(base, exponent)
    number = types.unliteral(base)
    is_whole = isinstance(number, (types.Integer, types.Boolean))
    factor = types.float64 if is_whole else number
    product, generate = _raised(typing_context, number, factor, exponent.literal_value)
    return product(number, exponent), generate


@register_pass(mutates_CFG=False, analysis_only=False)
class AdaptConstants(FunctionPass):
    """Convert constant operands to the types of the other operands, before type inference."""

    _name = "foo_ops_adapt_constants"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        for block in state.func_ir.blocks.values():
            block.body = list(_adapted(state.func_ir, block))
        return True


def _adapted(func_ir: ir.FunctionIR, block: ir.Block) -> Iterator[ir.Stmt]:
    for statement in block.body:
        expression: Any = getattr(statement, "value", None)
        number = _folded(func_ir, expression)
        if number is not None and isinstance(statement, ir.Assign):
            expression = statement.value = ir.Const(number, statement.loc)
        power = _constant_power(func_ir, expression)
        if power is not None:
            base, exponent, raise_ = power
            function, constant = _variable(block, "power"), _variable(block, "exponent")
            yield _define(func_ir, function, ir.Global("_power", raise_, statement.loc))
            yield _define(func_ir, constant, ir.Const(exponent, statement.loc))
            statement.value = ir.Expr.call(function, [base, constant], (), statement.loc)
        for constant, other in _meetings(func_ir, expression):
            function, result = _variable(block, "adapt"), _variable(block, "adapted")
            call = ir.Expr.call(function, [constant, other], (), statement.loc)
            yield _define(func_ir, function, ir.Global("_adapt", _adapt, statement.loc))
            yield _define(func_ir, result, call)
            _replace(expression, constant, result)
        yield statement


def _variable(block: ir.Block, name: str) -> ir.Var:
    return block.scope.redefine(f"${name}", block.loc)


def _define(func_ir: ir.FunctionIR, variable: ir.Var, value: Any) -> ir.Assign:
    func_ir._definitions[variable.name].append(value)
    return ir.Assign(value, variable, value.loc)


def _constant_power(func_ir: ir.FunctionIR, expression: Any) -> tuple[ir.Var, int, Any] | None:
    """Return base, exponent and intrinsic of a power with a small constant exponent, or None.

    An exponent such as 2.0, and math.pow, convert integers to floats.
    """
    if _is_operation(expression):
        function, operands = expression.fn, [expression.lhs, expression.rhs]
    elif isinstance(expression, ir.Expr) and expression.op == "call":
        function, operands = _value(func_ir, expression.func), list(expression.args)
    else:
        return None
    if function not in (operator.pow, operator.ipow, pow, math.pow) or len(operands) != 2:
        return None
    exponent = _value(func_ir, operands[1])
    if type(exponent) not in (int, float) or exponent not in _EXPONENTS:
        return None
    is_float = function is math.pow or type(exponent) is float
    return operands[0], int(exponent), _power_as_float if is_float else _power


def _meetings(func_ir: ir.FunctionIR, expression: Any) -> list[tuple[ir.Var, ir.Var]]:
    """Return each constant operand of an expression, with an operand that is not constant."""
    operands = _operands(func_ir, expression)
    constants = [operand for operand in operands if _is_constant(func_ir, operand)]
    others = [operand for operand in operands if not _is_constant(func_ir, operand)]
    return [(constant, others[0]) for constant in constants] if others else []


def _operands(func_ir: ir.FunctionIR, expression: Any) -> list[ir.Var]:
    """Return the operands that are promoted to one type, including those of a power."""
    if _is_operation(expression):
        return [] if expression.fn in _BITWISE else [expression.lhs, expression.rhs]
    is_call = isinstance(expression, ir.Expr) and expression.op == "call"
    if is_call and _value(func_ir, expression.func) in (max, min):
        return list(expression.args)
    return []


def _is_operation(expression: Any) -> bool:
    return isinstance(expression, ir.Expr) and expression.op in ("binop", "inplace_binop")


def _is_constant(func_ir: ir.FunctionIR, variable: ir.Var) -> bool:
    return type(_value(func_ir, variable)) in (int, float)


def _value(func_ir: ir.FunctionIR, variable: ir.Var) -> Any:
    """Return the value of a variable with a single constant definition, else None."""
    definitions = func_ir._definitions.get(variable.name, [])
    definition = definitions[0] if len(definitions) == 1 else None
    if isinstance(definition, (ir.Const, ir.Global, ir.FreeVar)):
        return definition.value
    if isinstance(definition, ir.Var):
        return _value(func_ir, definition)
    if not isinstance(definition, ir.Expr):
        return None
    if definition.op == "getattr":
        module = _value(func_ir, definition.value)
        return getattr(module, definition.attr, None) if isinstance(module, ModuleType) else None
    return _folded(func_ir, definition)


def _folded(func_ir: ir.FunctionIR, expression: Any) -> int | float | None:
    """Compute a constant expression; None if it is not constant."""
    if not isinstance(expression, ir.Expr):
        return None
    if expression.op == "static_getitem":
        numbers = _value(func_ir, expression.value)
        function, operands = operator.getitem, [numbers, expression.index]
        is_known = type(numbers) is tuple and type(expression.index) is int
    else:
        function, variables = _operation(func_ir, expression)
        operands = [_value(func_ir, variable) for variable in variables]
        is_known = all(type(operand) in (int, float) for operand in operands)
    if function is None or not operands or not is_known:
        return None
    number = _computed(function, operands)
    if type(number) is int:
        return number if -(2**63) <= number < 2**63 else None
    return number if type(number) is float else None


def _operation(func_ir: ir.FunctionIR, expression: ir.Expr) -> tuple[Any, list[ir.Var]]:
    """Return the function that computes an expression, or None, and its arguments."""
    if _is_operation(expression):
        return expression.fn, [expression.lhs, expression.rhs]
    if expression.op == "unary":
        return expression.fn, [expression.value]
    if expression.op == "call" and not expression.kws and not expression.vararg:
        function = _value(func_ir, expression.func)
        is_hashable = getattr(function, "__hash__", None) is not None
        return _FOLDED.get(function) if is_hashable else None, list(expression.args)
    return None, []


def _computed(function: Callable[..., Any], operands: list[Any]) -> Any:
    """Compute a number, with floats divided by 0 as in kernels; None if there is no result."""
    with np.errstate(all="ignore"):
        try:
            return function(*operands)
        except ArithmeticError:
            are_integers = all(type(operand) is int for operand in operands)
            return None if are_integers else float(function(*map(np.float64, operands)))
        except (LookupError, TypeError, ValueError):
            return None


def _replace(expression: ir.Expr, operand: ir.Var, by: ir.Var) -> None:
    if expression.op == "call":
        expression.args = [by if argument is operand else argument for argument in expression.args]
        return
    for side in ("lhs", "rhs"):
        if getattr(expression, side) is operand:
            setattr(expression, side, by)
