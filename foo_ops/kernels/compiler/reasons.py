"""Reword the compiler's errors for authors of kernels, and find the function to blame.

Numba describes errors by its own types. For an unknown function, it often gives the line where the
kernel begins, so the function is looked up in the kernel. Imports neither Numba nor LLVM.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from foo_ops.kernels.compiler.inspection import references

# ------------------------------------------------------------------------------------------- advice

# Advice: the code that replaces a function of Python, NumPy or torch.


LOOP = "for i in range({})"
SCRATCH = "scratch memory (library.scratch)"

# Functions of numbers that ``math`` lacks or has under another name.
NUMBERS = {
    "absolute": "abs(x)",
    "fabs": "abs(x)",
    "negative": "-x",
    "neg": "-x",
    "maximum": "max(x, y)",
    "fmax": "max(x, y)",
    "minimum": "min(x, y)",
    "fmin": "min(x, y)",
    "clip": "min(max(x, low), high)",
    "clamp": "min(max(x, low), high)",
    "where": "a if condition else b",
    "sigmoid": "1 / (1 + math.exp(-x))",
    "expit": "1 / (1 + math.exp(-x))",
    "relu": "max(x, 0.0)",
    "silu": "x / (1 + math.exp(-x))",
    "softplus": "math.log1p(math.exp(x))",
    "rsqrt": "1 / math.sqrt(x)",
    "reciprocal": "1 / x",
    "square": "x * x",
    "sign": "(x > 0) - (x < 0)",
    "power": "x ** y",
    "float_power": "x ** y",
    "rint": "round(x)",
    "around": "round(x)",
    "fix": "math.trunc(x)",
    "remainder": "x % y",
    "mod": "x % y",
    "floor_divide": "x // y",
    "divide": "x / y",
    "div": "x / y",
    "true_divide": "x / y",
    "add": "x + y",
    "subtract": "x - y",
    "sub": "x - y",
    "multiply": "x * y",
    "mul": "x * y",
    "logical_and": "x and y",
    "logical_or": "x or y",
    "logical_not": "not x",
    "bitwise_and": "x & y",
    "bitwise_or": "x | y",
    "bitwise_xor": "x ^ y",
    "equal": "x == y",
    "less": "x < y",
    "greater": "x > y",
    "gelu": "0.5 * x * (1 + math.erf(x * math.sqrt(0.5)))",
    "item": "x[i]",
    "float": "language.cast(x, like)",
    "to": "language.cast(x, like)",
    "astype": "language.cast(x, like)",
    "abs": "abs(x)",
    "round": "round(x)",
    "fma": "language.fma(a, b, c)",
    "factorial": "math.gamma(x + 1)",
    "isclose": "abs(x - y) <= tolerance",
    "isqrt": "int(math.sqrt(x))",
    "modf": "x - math.trunc(x)",
}
IN_MATH = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign"),
    *("cos", "cosh", "degrees", "erf", "erfc", "exp", "exp2", "expm1", "floor", "fmod", "gamma"),
    *("hypot", "isfinite", "isinf", "isnan", "lgamma", "log", "log10", "log1p", "log2", "pow"),
    *("radians", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
_MATH_ALIASES = {
    **{f"arc{name}": f"a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "tan2")},
    "deg2rad": "radians",
    "rad2deg": "degrees",
    "gammaln": "lgamma",
}
_OF_TWO = ("atan2", "copysign", "fmod", "hypot", "pow")

# Functions of many numbers, each with a loop that computes the same.
_SUM = "total = language.accumulate(total, x[i])"
REDUCTIONS = {
    **dict.fromkeys(("sum", "nansum", "fsum"), _SUM),
    **dict.fromkeys(
        ("max", "amax", "nanmax"), "largest = language.accumulate_maximum(largest, x[i])"
    ),
    **dict.fromkeys(("min", "amin", "nanmin"), "least = min(least, x[i])"),
    **dict.fromkeys(("mean", "nanmean", "average", "fmean"), f"{_SUM}, then divide by the size"),
    **dict.fromkeys(("prod", "nanprod"), "product *= x[i]"),
    **dict.fromkeys(
        ("var", "std", "stdev", "pvariance", "variance", "pstdev", "norm", "count_nonzero", "ptp"),
        "total = language.accumulate(total, ...)",
    ),
    **dict.fromkeys(("argmax", "argmin"), "if x[i] > x[best]: best = i"),
    **dict.fromkeys(("any", "all"), "found = found or x[i] > 0"),
    **dict.fromkeys(("cumsum", "cumprod", "accumulate", "diff"), "y[i] = y[i - 1] + x[i]"),
    **dict.fromkeys(
        ("dot", "inner", "vdot", "sumprod"), "total = language.accumulate(total, x[i] * y[i])"
    ),
    **dict.fromkeys(
        ("softmax", "log_softmax", "logsumexp"),
        "total = language.accumulate(total, math.exp(x[i] - largest))",
    ),
    "reduce": "total = f(total, x[i])",
}
_PRODUCTS = ("matmul", "mm", "bmm", "einsum", "addmm", "linear", "tensordot", "outer", "mv")
_SORTS = (
    *("sorted", "sort", "argsort", "topk", "partition", "argpartition", "median", "nanmedian"),
    *("unique", "kthvalue", "quantile", "percentile", "mode", "heappush", "heappop"),
)
_MEMORY = (
    *("zeros", "zeros_like", "ones", "ones_like", "empty", "empty_like", "full", "full_like"),
    *("array", "asarray", "tensor", "as_tensor", "arange", "linspace", "eye", "list", "dict"),
    *("set", "frozenset", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"),
    *("new_zeros", "new_empty", "cat", "concatenate", "stack", "clone", "copy"),
)
_RANDOMS = (
    *("rand", "randn", "rand_like", "randn_like", "random", "uniform", "randint", "normal"),
    *("gauss", "randrange", "choice", "shuffle", "bernoulli", "multinomial", "dropout"),
    *("default_rng", "standard_normal", "random_sample", "normalvariate"),
)
LOOPS = ("enumerate", "zip", "reversed", "map", "filter", "iter", "next", "chain", "nditer")
QUESTIONS = ("isinstance", "issubclass", "type", "hasattr", "getattr", "callable", "is_tensor")
_WRITES = ("fill_", "zero_", "copy_", "setattr", "add_", "mul_", "fill", "scatter_")


def advice_for(name: str, size: str = "x.shape[-1]", *, sees_rows: bool = True) -> str:
    """Return advice on what to write in a kernel in place of a function, or an empty string.

    Args:
        name: the function's name.
        size: the expression for the size of its argument in the kernel.
        sees_rows: false for an elementwise kernel, which sees one number of each tensor.

    Example:
        >>> advice_for("arctan")
        'write math.atan(x)'
        >>> advice_for("sum")
        'write a loop, for i in range(x.shape[-1]): total = language.accumulate(total, x[i])'
    """
    name = _MATH_ALIASES.get(name, name)
    if name in IN_MATH:
        return f"write math.{name}({'x, y' if name in _OF_TWO else 'x'})"
    if name in NUMBERS:
        return f"write {NUMBERS[name]}"
    if name in _RANDOMS:
        return "write language.random(seed, offset)"
    if name in QUESTIONS:
        return "a kernel is compiled for each dtype and number of dimensions; x.ndim is a constant"
    of_many = {
        **dict.fromkeys(_PRODUCTS, "language.dot(target, a, b) multiplies matrices"),
        **dict.fromkeys(_SORTS, f"write a loop that sorts, in {SCRATCH}"),
        **dict.fromkeys(_MEMORY, f"use {SCRATCH}"),
        **dict.fromkeys(LOOPS, f"write a loop over indices, {LOOP.format(size)}"),
        **dict.fromkeys(_WRITES, f"write a loop, {LOOP.format(size)}: x[i] = value"),
        **{it: f"write a loop, {LOOP.format(size)}: {step}" for it, step in REDUCTIONS.items()},
        "len": f"write {size}",
    }
    if name in of_many and not sees_rows:
        return (
            "an elementwise kernel sees one number; use a tile kernel (library.tile_kernel) "
            "for rows"
        )
    return of_many.get(name, "")


# ----------------------------------------------------------------------------------------- calls


@dataclasses.dataclass(frozen=True)
class Named:
    """A function that a kernel names, and the place.

    Attributes:
        words: the name as written in the kernel, such as ``torch.exp``.
        name: the function's own name.
        is_known: kernels support the function, for numbers or tuples of them.
    """

    words: str
    name: str
    file: str
    line: int
    is_known: bool

    def refusal(self, *, sees_rows: bool) -> str:
        advice = advice_for(self.name, sees_rows=sees_rows)
        return f"a kernel cannot call {self.words}" + (f": {advice}" if advice else "")


_KNOWN = {
    *(abs, bool, complex, divmod, enumerate, float, int, isinstance, len, max, min, pow, print),
    *(range, round, slice, str, sum, tuple, zip),
    *(getattr(math, name) for name in (*IN_MATH, "ldexp", "frexp") if hasattr(math, name)),
}


def named_functions(functions: tuple[Callable[..., Any], ...]) -> Iterator[Named]:
    """Yield the functions of Python, NumPy and torch that functions and their callees name."""
    seen: set[int] = set()
    waiting: list[Any] = list(functions)
    while waiting:
        function = waiting.pop(0)
        if id(function) in seen:
            continue
        seen.add(id(function))
        scope = {**vars(builtins), **function.__globals__, **_closure(function)}
        for named, value in _named_in(function.__code__, scope):
            package = _package_of(value)
            if package in _LIBRARIES:
                yield named
            elif package != "foo_ops" and isinstance(value, types.FunctionType):
                waiting.append(value)


def _closure(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of a function's free variables, except empty cells."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    return {name: value for name, cell in cells for value in _contents(cell)}


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _named_in(code: types.CodeType, scope: dict[str, Any]) -> Iterator[tuple[Named, Any]]:
    """Yield the values, and attributes of modules, that code and its inner code name."""
    for (first, *attributes), line in references(code):
        words, value = first, scope.get(first)
        while isinstance(value, types.ModuleType) and attributes:
            name = attributes.pop(0)
            words, value = f"{words}.{name}", getattr(value, name, None)
        if value is not None and not isinstance(value, types.ModuleType):
            outer, _, name = words.rpartition(".")
            name = name if outer else getattr(value, "__name__", name)
            is_known = isinstance(value, (type, types.BuiltinFunctionType)) and value in _KNOWN
            yield Named(words, name, code.co_filename, line, is_known), value


_LIBRARIES = {"numpy", "scipy", "torch", *sys.stdlib_module_names}
_STANDARD = os.path.dirname(os.__file__)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")


def _package_of(value: Any) -> str:
    """Return the package that a function comes from; an empty string if it is not callable."""
    if not callable(value):
        return ""
    if isinstance(value, types.FunctionType) and value.__module__ in (None, "builtins"):
        return ""  # It was made by exec.
    return str(getattr(value, "__module__", None) or type(value).__module__).partition(".")[0]


def is_of_library(file: str) -> bool:
    """Whether a file belongs to Python, NumPy or torch."""
    installed = _INSTALLED.search(file)
    if installed:
        return installed[1] in _LIBRARIES
    return file.startswith((_STANDARD + os.sep, "<frozen"))


# -------------------------------------------------------------------------- the compiler's words

_KINDS = {
    "Row": "a row",
    "View": "a tensor",
    "Flat": "x.flat",
    "Matrix": "a slice",
    "Extents": "x.shape or x.strides",
    "Numbers": "a list of numbers",
    "FixedNumbers": "a list of numbers",
    "Tensors": "a list of tensors",
}
_ATTRIBUTES = {
    "View": "ndim, size, rows, shape, strides, flat, data and row(i)",
    "Row": "elements, row[i], and its size is x.shape[-1]",
    "Flat": "elements, x.flat[i], and its size is x.size",
    "Matrix": "rows, columns, T and data",
    "Extents": "numbers, x.shape[d] and x.strides[d]",
}
_SPECIFIC = {
    "numel": "write x.size",
    "nelement": "write x.size",
    "dim": "write x.ndim",
    "dtype": "values are converted where they are written, or by language.cast(value, x)",
    "stride": "write x.strides[d]",
    "T": "x[:, :].T is the transpose of a matrix, for language.dot",
    "mT": "x[:, :].T is the transpose of a matrix, for language.dot",
    "device": "a kernel is the same on every device",
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "contains", "not_", "and_", "or_")
_ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "invert"),
    *("xor", "lshift", "rshift"),
)
_CALL = re.compile(
    r"No implementation of function Function\(<[^>]*>\) found for signature: (\w+)\((.*)\)$"
)
_MODULE = re.compile(r"Unknown attribute '(\w+)' of type Module\(<module '([\w.]+)'")
_NUMPY = re.compile(r"Use of unsupported NumPy function '[\w.]*?(\w+)'")
_ATTRIBUTE = re.compile(r"Unknown attribute '(\w+)' of type (\w+)")
_UNTYPED = re.compile(r"Untyped global name '(\w+)'")
_USE = re.compile(
    r"Invalid use of (?:<built-in function )?(\w+)(?:>|\(.*?\))? with parameters \((.*)\)$"
)
_UNPACKED = re.compile(r"failed to unpack (\w+)\(")
_CAST = re.compile(r"Cannot cast (\w+)\(.*\) to (\w+)")
_UNIFIED = re.compile(r"Cannot unify (.*) and (.*) for '([^']*)'")
_TAKEN = re.compile(r"(\w+|\*\*) takes .*, got (\w+)\(")
# Reasons that do not name the function to blame.
_OBSCURE = re.compile(
    r"a kernel must not (?:allocate|raise)|Implementation function returned|Unsupported constraint"
)
_YIELDS = "The use of yield in a closure is unsupported."
_OPCODES = {
    "LOAD_BUILD_CLASS": "a kernel cannot define a class",
    "STORE_GLOBAL": "a kernel cannot write to a global: write to an argument",
}


def is_blamed(named: Named, reason: str) -> bool | None:
    """Whether a reason is about a function; None if it names no function.

    A reason without a name is about every function that kernels never have.
    """
    if reason == _YIELDS:
        return True if named.name in REDUCTIONS else None
    if named.is_known:
        return None
    if _OBSCURE.match(reason):
        return True if advice_for(named.name) else None
    for pattern in (_UNTYPED, _MODULE, _NUMPY, _CALL):
        found = pattern.match(reason)
        if found:
            return found[1] in (named.name, named.words.rpartition(".")[2])
    return None


def reworded(reason: str, *, sees_rows: bool) -> str:
    """Return the compiler's reason, reworded, with advice on what to write instead."""
    if reason == "a kernel must not allocate" or reason.startswith("Unsupported constraint"):
        return "a kernel must not allocate" + f": use {SCRATCH}" * sees_rows
    if reason == _YIELDS:
        return f"a kernel cannot use generators: write a loop, {LOOP.format('n')}"
    for opcode, words in _OPCODES.items():
        if f"({opcode})" in reason:
            return words
    for pattern, word in (
        (_CALL, _of_call),
        (_ATTRIBUTE, _of_attribute),
        (_USE, _of_use),
        (_UNPACKED, _of_unpacking),
        (_CAST, _of_cast),
        (_TAKEN, _of_numbers),
        (_UNIFIED, _of_branches),
    ):
        found = pattern.match(reason)
        better = word(*found.groups(), sees_rows=sees_rows) if found else None
        if better is not None:
            return f"{reason}: {better}" if better.startswith("write ") else better
    return reason


def _of_unpacking(kind: str, *, sees_rows: bool) -> str | None:
    if kind not in _KINDS:
        return None
    return f"{_KINDS[kind]} cannot be unpacked: take its elements, x[0], x[1]"


def _of_cast(kind: str, target: str, *, sees_rows: bool) -> str | None:
    if kind not in _KINDS:
        return None
    return f"{_KINDS[kind]} cannot be converted to {target}: {_elements(kind)}"


def _of_numbers(name: str, kind: str, *, sees_rows: bool) -> str | None:
    if kind not in _KINDS:
        return None
    if name == "**":
        return f"{_KINDS[kind]} has no arithmetic: {_elements(kind)}"
    return f"{name} takes numbers, got {_KINDS[kind]}: {_elements(kind)}"


def _of_branches(one: str, other: str, name: str, *, sees_rows: bool) -> str | None:
    kinds = [_KINDS.get(type_.partition("(")[0], type_) for type_ in (one, other)]
    what = "a value" if name.startswith("$") else name.partition(".")[0]
    return f"{what} must have one type, got {kinds[0]} in one branch and {kinds[1]} in another"


_SIZES = {"Row": "x.shape[-1]", "Matrix": "x.shape[-1]"}


def _elements(kind: str) -> str:
    """Return advice on computing with the elements of a value that has no arithmetic."""
    if kind == "Extents":
        return "x.shape[d] and x.strides[d] are numbers"
    element = {"Row": "row[i]", "Matrix": "x[r, i]"}.get(kind, "x.flat[i]")
    return (
        f"compute with its elements, {LOOP.format(_SIZES.get(kind, 'x.size'))}: ... {element} ..."
    )


def _kind_in(parameters: str) -> str | None:
    """Return the first type of a signature that has elements."""
    types_ = (part.partition("(")[0] for part in _split(parameters))
    return next((type_ for type_ in types_ if type_ in _KINDS), None)


def _split(parameters: str) -> list[str]:
    """Split at commas that are not inside of a type, as in ``View(2d, Row(float32), x), int64``."""
    depth, parts = 0, [""]
    for character in parameters:
        depth += (character in "([<") - (character in ")]>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _of_call(name: str, parameters: str, *, sees_rows: bool) -> str | None:
    kind = _kind_in(parameters)
    if kind is None:
        is_of_many = name in REDUCTIONS and not sees_rows
        return (
            f"a kernel cannot call {name}: {advice_for(name, sees_rows=False)}"
            if is_of_many
            else None
        )
    what, size = _KINDS[kind], _SIZES.get(kind, "x.size")
    if name in ("matmul", "imatmul"):
        return f"{what} has no arithmetic: language.dot(target, a, b) multiplies matrices"
    if name in ("getitem", "setitem"):
        if "slice" not in parameters and "..." not in parameters:
            return None
        if name == "getitem":
            return f"{what} cannot be sliced, except for language.dot: {_elements(kind)}"
        element = "row[i]" if kind == "Row" else "x[r, i]"
        loop = LOOP.format("x.shape[-1]")
        return f"a slice cannot be written: write its elements, {loop}: {element} = value"
    if name in _ARITHMETIC or name.removeprefix("i") in _ARITHMETIC:
        return f"{what} has no arithmetic: {_elements(kind)}"
    if name in _COMPARISONS:
        return f"{what} cannot be compared: {_elements(kind)}"
    advice = advice_for(name, size)
    if name in QUESTIONS or name == "len" or name in LOOPS or name in REDUCTIONS:
        return f"a kernel cannot call {name} on {what}: {advice}"
    return f"{name} takes numbers, got {what}: {_elements(kind)}"


def _of_attribute(name: str, kind: str, *, sees_rows: bool) -> str | None:
    if kind not in _KINDS:
        return (
            advice_for(name)
            if name in NUMBERS or advice_for(name).startswith("write math")
            else None
        )
    advice = _SPECIFIC.get(name) or advice_for(name, _SIZES.get(kind, "x.size"))
    there = f"it has {_ATTRIBUTES[kind]}" if kind in _ATTRIBUTES else "it has elements, x[i]"
    return f"{_KINDS[kind]} has no {name}: {advice or there}"


def _of_use(name: str, parameters: str, *, sees_rows: bool) -> str | None:
    kind = _kind_in(parameters)
    if name == "BoundFunction":
        given = re.sub(r"Literal\[\w+\]\((.*?)\)", r"\1", parameters)
        return f"x.row takes one integer, got ({given})"
    if re.fullmatch(r"u?int\d+|float\d+", name):
        return "a number cannot be called: x.size, x.shape[d] and x.strides[d] are numbers"
    if kind is None:
        return None
    if name == "getiter":
        return f"a kernel cannot iterate over {_KINDS[kind]}: {_elements(kind)}"
    return _of_call(name, parameters, sees_rows=sees_rows)
