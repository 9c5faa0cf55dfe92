"""Advice for kernels: what to write in place of a function of Python, NumPy or torch."""

from __future__ import annotations

LOOP = "for i in range({})"
SCRATCH = "scratch memory, which library.scratch gives a tile kernel"

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
        return "an elementwise kernel sees one number, and a tile kernel (library.tile_kernel) rows"
    return of_many.get(name, "")
