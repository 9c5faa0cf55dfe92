"""Functions of ``math`` in kernels: error bounds against mpmath at 1200 bits; special values."""

import math
import re
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from support.parts import whole

from foo_ops import language, library
from foo_ops.kernels.compiler import emit
from foo_ops.kernels.compiler.processor import vector_bits
from foo_ops.kernels.compiler.python_math import MATH

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
# Units in the last place, as documented in docs/kit_reference.md.
BOUNDS = {
    "sqrt": 0.5,
    **dict.fromkeys(("log", "sin", "cos", "hypot", "cbrt"), 1),
    **dict.fromkeys(("exp", "exp2", "erf", "pow", "cosh", "asin", "acos", "atan"), 1.5),
    **dict.fromkeys(("log1p", "log2", "log10", "tan", "sinh", "atan2"), 2),
    **dict.fromkeys(("expm1", "asinh", "acosh", "atanh"), 3),
    "tanh": 4,
    **dict.fromkeys(("erfc", "lgamma"), 5),
    "gamma": 6,
}
OF_TWO = ("atan2", "hypot", "pow")
POSITIVE = ("log", "log2", "log10", "sqrt", "pow")


def define(name, function):
    return library.numba_op(f"foo_math::{name}")(function)


def of_one(function):
    def kernel(x: float) -> float:
        return function(x)

    return kernel


def of_two(function):
    def kernel(x: float, y: float) -> float:
        return function(x, y)

    return kernel


OPERATORS = {
    name: define(name, (of_two if name in OF_TWO else of_one)(getattr(math, name)))
    for name in BOUNDS
    if hasattr(math, name)
}
ROUNDING = {
    name: define(name, of_one(function))
    for name, function in (
        *(("floor", math.floor), ("ceil", math.ceil), ("trunc", math.trunc), ("round", round)),
    )
}


def samples(dtype, count=150):
    """Return numbers of all sizes, near 0 and 1, near the multiples of pi/2, and worst cases."""
    kind, generator = DTYPES[dtype], np.random.default_rng(0)
    limits = np.finfo(kind)
    smallest, largest = (math.log(float(number)) for number in (limits.tiny, limits.max))
    every = np.exp(generator.uniform(smallest, largest, count))
    near_zero = np.exp(generator.uniform(math.log(limits.eps) - 5, 0, count))
    parts = [
        *(generator.uniform(-2, 2, count), generator.uniform(-30, 30, count), every, -every),
        *(generator.uniform(-1.2, 1.2, count) * limits.maxexp, near_zero, -near_zero),
        *(limits.tiny * generator.uniform(0, 1, 20), 1 + generator.normal(size=count) * 1e-3),
        np.arange(-60, 60) * math.pi / 2,
        # Their quarter turns are still counted one by one.
        np.arange(2**29, 2**29 + 2**21, 2**14 + 1) * math.pi / 2,
        # The nearest numbers to multiples of pi/2 (Muller 2006, table 11.1), and in float32.
        [6381956970095103.0 * 2.0**797 if dtype == torch.float64 else 16367173.0 * 2.0**72],
    ]
    return torch.from_numpy(np.concatenate(parts).astype(kind))


def units(result, exact, dtype):
    """Return the error of a result, in units of the exact result's last place."""
    limits = np.finfo(DTYPES[dtype])
    too_large = mpmath.mpf(float(limits.max)) * (1 + mpmath.mpf(2) ** (-limits.nmant - 2))
    if not math.isfinite(result):
        return 0 if abs(exact) > too_large and (result > 0) == (exact > 0) else math.inf
    exponent = mpmath.frexp(exact)[1] - 1 if exact != 0 else limits.minexp
    last = mpmath.mpf(2) ** (max(exponent, limits.minexp) - limits.nmant)
    return float(abs(mpmath.mpf(result) - exact) / last)


def exactly(name, *numbers):
    x, *others = map(mpmath.mpf, numbers)
    if name == "pow":
        # mpmath would compute all digits of an integer power.
        power = others[0] * mpmath.log(x)
        return mpmath.exp(max(min(power, 2000), -2000))
    if name == "erfc" and abs(x) > 100:
        return mpmath.mpf(0 if x > 0 else 2)
    if name == "lgamma":
        return mpmath.loggamma(x)
    bases = {"exp2": lambda: mpmath.mpf(2) ** x, "log2": lambda: mpmath.log(x, 2)}
    exact = bases.get(name, lambda: getattr(mpmath, name)(x, *others))()
    return mpmath.sign(x) * mpmath.cbrt(abs(x)) if name == "cbrt" else exact


def arguments(name, dtype):
    """Return numbers in the domain of a function, and near its ends."""
    x, limits = samples(dtype), torch.finfo(dtype)
    if name == "pow":
        x = x[x != 0].abs()
        # Also near the largest powers, where digits of the logarithm matter.
        near, size = torch.linspace(0.6, 1.7, 300, dtype=dtype), math.log2(limits.max)
        large = torch.linspace(-size, size, 300, dtype=dtype).flip(0) / near.log2()
        return torch.cat((x, near)), torch.cat((x.log2().clamp(-2, 2).flip(0) * 7, large))
    if name in OF_TWO:
        mixed = torch.from_numpy(np.random.default_rng(1).permutation(x.numpy()))
        others = torch.cat((mixed, x * 1.001, x.flip(0)))
        return x.repeat(3)[others != 0], others[others != 0]
    if name in POSITIVE:
        x = x.abs()
    elif name == "log1p":
        x = x[x > -1]
    elif name in ("asin", "acos", "atanh"):
        below = 1 - limits.eps * torch.arange(1, 40, dtype=dtype) ** 3
        x = torch.cat((x[x.abs() < 1], below, -below, x[x.abs() < 2] / 2))
    elif name == "lgamma":
        x = torch.cat((x.abs(), *(around + x[x.abs() < 0.5] for around in (1, 2, 3, 9))))
    elif name == "gamma":
        x = x[(x.abs() < 184) & (x != x.trunc())]
    elif name == "acosh":
        x = torch.cat((x.abs() + 1, 1 + limits.eps * torch.arange(1, 40, dtype=dtype) ** 3))
    return (x[x != 0],)


@pytest.mark.parametrize("dtype", [torch.float32, *whole(torch.float64)], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_bounds(name, dtype):
    numbers = arguments(name, dtype)
    result = OPERATORS[name](*numbers)
    assert result.dtype == dtype
    with mpmath.workprec(1200):
        errors = [
            units(float(value), exactly(name, *map(float, each)), dtype)
            for value, *each in zip(result, *numbers)
        ]
    worst = int(np.argmax(errors))
    where = [float(it[worst]) for it in (*numbers, result)]
    assert errors[worst] <= BOUNDS[name], (errors[worst], where)


@pytest.mark.whole
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_function_calls_the_c_library(dtype, tmp_path, monkeypatch):
    """Only remainders of huge quotients may: any other function would be called once per number."""
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(emit, "ALLOWED_SYMBOLS", {"memcpy", "memset", "memmove", "fmod", "fmodf"})
    x = torch.ones(8, dtype=dtype)
    for name in dir(math):
        function = getattr(math, name)
        if name not in MATH or name in ("ceil", "floor", "trunc"):
            continue
        count = 2 if name in (*OF_TWO, "copysign", "fmod") else 1
        operator = define(f"inlined_{name}_{dtype.itemsize}", (of_one, of_two)[count - 1](function))
        operator(*[x] * count)


def test_the_documents_have_the_same_bounds():
    text = (Path(__file__).parents[2] / "docs/kit_reference.md").read_text()
    rows = re.findall(r"^\| (`math[^|]*) \| ([\d.]+) \|", text, flags=re.MULTILINE)
    documented = {
        name: float(bound) for names, bound in rows for name in re.findall(r"`math\.(\w+)`", names)
    }
    assert documented == BOUNDS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - {*OF_TWO}))
def test_special_values(name, dtype):
    """Infinity, NaN, signed zeros, the ends of the domain."""
    special = [math.inf, -math.inf, math.nan, 0.0, -0.0, -1.0, 1.0, -2.5, 1e30, -1e30]
    special += [torch.finfo(dtype).smallest_normal / 8, -torch.finfo(dtype).smallest_normal / 8]
    x = torch.tensor(special, dtype=dtype)
    result = OPERATORS[name](x)
    if name == "gamma":
        values = [math.inf, math.nan, math.nan, math.inf, -math.inf, math.nan, 1.0]
        values += [-0.9453087204829419, math.inf, math.nan, math.inf, -math.inf]
        expected = torch.tensor(values, dtype=dtype)
    elif name == "cbrt":
        expected = torch.from_numpy(np.cbrt(x.numpy()))
    else:
        expected = getattr(torch, name)(x)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    assert torch.equal(result.signbit()[~result.isnan()], expected.signbit()[~expected.isnan()])
    torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_powers_of_special_values(dtype):
    special = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5]
    special += [3.0, -3.0, 4.0, 1e30, -1e30, 1e-30, 0.5, -0.5]
    special = torch.tensor(special, dtype=dtype)
    x, y = special[:, None], special[None, :]
    result = OPERATORS["pow"](x, y)
    expected = torch.from_numpy(np.power(*np.broadcast_arrays(x.numpy(), y.numpy())))
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.signbit()[~result.isnan()], expected.signbit()[~expected.isnan()])
    torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["atan2", "hypot"])
def test_special_values_of_two(name, dtype):
    special = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e30, -1e-40]
    special = torch.tensor(special, dtype=dtype)
    x, y = special[:, None], special[None, :]
    result = OPERATORS[name](x, y)
    expected = torch.from_numpy(
        getattr(np, {"atan2": "arctan2"}.get(name, name))(x.numpy(), y.numpy())
    )
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.signbit()[~result.isnan()], expected.signbit()[~expected.isnan()])
    torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lgamma_below_zero(dtype):
    x = samples(dtype)
    x = -x[(x.abs() < 1e6) & (x != x.trunc())].abs()
    for value, number in zip(OPERATORS["lgamma"](x).tolist(), x.tolist()):
        exact = float(mpmath.log(abs(mpmath.gamma(number)))) if number > -1e4 else None
        if exact is None:
            exact = float(mpmath.re(mpmath.loggamma(number)))
        size = max(1, abs(number) * math.log(2 - number), abs(exact))
        assert abs(value - exact) <= 2 * size * torch.finfo(dtype).eps, number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factorials_are_exact(dtype):
    count = 15 if dtype == torch.float32 else 17
    factorials = [float(np.float32(math.factorial(n))) for n in range(count)]
    if dtype == torch.float64:
        factorials = [float(math.factorial(n)) for n in range(count)]
    assert OPERATORS["gamma"](torch.arange(1, count + 1, dtype=dtype)).tolist() == factorials


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logarithms_of_powers_are_exact(dtype):
    tens = torch.tensor([10.0**power for power in range(11)], dtype=dtype)
    assert OPERATORS["log10"](tens).tolist() == list(range(11))
    twos = torch.tensor([2.0**power for power in range(-120, 121)], dtype=dtype)
    assert OPERATORS["log2"](twos).tolist() == list(range(-120, 121))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUNDING)
def test_rounding(name, dtype):
    """Results are floats, so that no size overflows, and zeros keep their signs."""
    numbers = [0.5, 1.5, 2.5, 0.49999997, 2.0**31 + 1, 2.0**63, 2.0**70, 1e30, math.inf, 0.0, 1e-40]
    x = torch.tensor([*numbers, *(-number for number in numbers), math.nan], dtype=dtype)
    result, expected = ROUNDING[name](x), getattr(torch, name)(x)
    assert result.dtype == dtype
    assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(result.signbit()[:-1], expected.signbit()[:-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "sin", "pow", "floor", "atan2", "tan"])
def test_half_precision_computes_in_float32(name, dtype):
    operator = {**OPERATORS, **ROUNDING}[name]
    x = torch.linspace(0.125, 9, 200).to(dtype)
    arguments = (x, x.flip(0)) if name in OF_TWO else (x,)
    expected = operator(*(argument.float() for argument in arguments)).to(dtype)
    assert torch.equal(operator(*arguments), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [0.5, -0.5])
def test_half_powers_are_square_roots(exponent, dtype):
    """Constant exponents are exact to the last bit; -infinity and -0.0 follow C's pow."""
    name = f"foo_math::half_{exponent > 0}_{torch.finfo(dtype).bits}"

    @library.numba_op(name)
    def power(x: float) -> float:
        return x**exponent

    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -2.5], dtype=dtype)
    x = torch.cat((samples(dtype), special))
    with np.errstate(invalid="ignore"):
        root = torch.from_numpy(np.sqrt(torch.where(x == -math.inf, math.inf, x + 0.0).numpy()))
    expected = root if exponent > 0 else 1 / root
    torch.testing.assert_close(power(x), expected, rtol=0, atol=0, equal_nan=True)
    exponents, rtol = torch.full_like(x, exponent), 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        OPERATORS["pow"](x, exponents), expected, rtol=rtol, atol=0, equal_nan=True
    )


def test_integers_are_float64():
    @library.numba_op("foo_math::of_integers")
    def of_integers(x: int, y: int) -> tuple[float, float, float]:
        return math.exp(x), math.pow(x, 2), x**2.0

    x = torch.tensor([-2, 0, 3])
    exponential, square, other = of_integers(x, x)
    torch.testing.assert_close(exponential.double(), x.double().exp(), rtol=1e-6, atol=0)
    assert square.tolist() == other.tolist() == [4, 0, 9]


@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - {"exp2"}))
def test_explicit_vectors_give_the_same(name):
    """Results are equal to the last bit, including the branches for rare numbers."""
    function, of_one, operator = getattr(language, name), name not in OF_TWO, OPERATORS[name]
    library.define(f"foo_math::vector_{name}", "(Tensor input, Tensor other) -> Tensor")
    library.register_fake(f"foo_math::vector_{name}", lambda input, other: torch.empty_like(input))

    @library.register_kernel(f"foo_math::vector_{name}", "cpu")
    @library.tile_kernel(contiguous_rows=True)
    def vectors(input, other, output, rows):
        step = language.lanes(input)
        for row in rows:
            x, y, z = input.row(row), other.row(row), output.row(row)
            for start in range(0, input.shape[-1], step):
                v = language.load_vector(x, start, step)
                if of_one:
                    language.store(z, start, function(v))
                else:
                    language.store(z, start, function(v, language.load_vector(y, start, step)))

    for dtype in DTYPES:
        x = torch.cat((torch.linspace(-3, 3, 64, dtype=dtype), samples(dtype)[:320]))
        arguments = (x,) if of_one else (x, x.flip(0))
        result = getattr(torch.ops.foo_math, f"vector_{name}")(x, x.flip(0))
        expected = operator(*arguments)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_a_result_does_not_depend_on_its_neighbours(name, dtype):
    """Huge numbers take a different branch, alone or in a vector."""
    x = torch.linspace(-9, 9, 83, dtype=dtype)
    huge = x.clone()
    huge[::7], huge[40] = 3e30 * x[::7], torch.inf
    operator = OPERATORS[name]
    result, alone = operator(huge), torch.cat([operator(it) for it in huge.split(1)])
    assert result[40].isnan()
    assert result.nan_to_num().equal(alone.nan_to_num())
    is_usual = huge == x
    assert result[is_usual].equal(operator(x)[is_usual])


@pytest.mark.parametrize("share", [1, 2])
def test_erf_is_the_same_in_vectors_of_all_lanes(share):
    """A vector looks up its coefficients in a register, if its size allows it."""
    name, lanes = f"foo_math::erf_{share}", vector_bits() // 32 // share
    library.define(name, "(Tensor input) -> Tensor")
    library.register_fake(name, torch.empty_like)

    @library.register_kernel(name, "cpu")
    @library.tile_kernel(contiguous_rows=True)
    def vectors(input, output, rows):
        for row in rows:
            x, y = input.row(row), output.row(row)
            for start in range(0, input.shape[-1], lanes):
                language.store(y, start, language.erf(language.load_vector(x, start, lanes)))

    x = torch.linspace(-4.5, 4.5, 3201)[1:]
    x[:3] = torch.tensor([torch.nan, torch.inf, 0.90234375])
    operator = OPERATORS["erf"]
    scalar = torch.cat([operator(it) for it in x.split(1)])
    assert scalar[0].isnan()
    assert scalar[1] == 1
    for result in (getattr(torch.ops.foo_math, f"erf_{share}")(x), operator(x)):
        assert torch.equal(result.view(torch.int32)[1:], scalar.view(torch.int32)[1:])
