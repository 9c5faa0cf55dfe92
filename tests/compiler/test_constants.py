"""Constants in kernels take the type of their operands, as Python's numbers do in torch."""

import math

import pytest
import torch
from support.exact import assert_near

from foo_ops import language, library

TENTH = 0.1
THIRDS = (1 / 3, 2 / 3)
ZERO, ONE = 0.0, 1.0


def accumulated(x):
    total = x
    total += 1
    total -= 0.3
    total *= 0.7
    return total


def with_a_local(x):
    tenth, count = TENTH, 3
    return x * tenth / count


def divided_by(divisor):
    return lambda x: x / divisor


def power8(x):
    fourth = (x * x) * (x * x)
    return fourth * fourth


# A function of scalars, and its equivalent on torch tensors, where constants do not promote.
FORMULAS = {
    "float": (lambda x: x * 0.1, lambda x: x * 0.1),
    "from the left": (lambda x: 0.1 - x, lambda x: 0.1 - x),
    "int": (lambda x: 7 * x + 3, lambda x: 7 * x + 3),
    "in place": (accumulated, lambda x: ((x + 1) - 0.3) * 0.7),
    "global": (lambda x: x * TENTH, lambda x: x * 0.1),
    "attribute of a module": (lambda x: x * math.pi, lambda x: x * math.pi),
    "closure": (divided_by(0.3), lambda x: x / torch.tensor(0.3, dtype=x.dtype)),
    "max": (lambda x: max(x, 0.1), lambda x: x.clamp(min=0.1)),
    "min of three": (lambda x: min(0.7, x, 0.3), lambda x: x.clamp(max=0.3)),
    "square": (lambda x: x**2, lambda x: x * x),
    "cube": (lambda x: x**3, lambda x: x * (x * x)),
    "root": (lambda x: x * math.sqrt(0.5), lambda x: x * math.sqrt(0.5)),
    "function of kernels": (lambda x: x * language.exp(0.5), lambda x: x * math.exp(0.5)),
    "functions of globals": (
        lambda x: x + math.log(math.pi * TENTH) / 3,
        lambda x: x + math.log(math.pi * 0.1) / 3,
    ),
    "arithmetic": (lambda x: (TENTH * 3 - -TENTH) * x, lambda x: (0.1 * 3 + 0.1) * x),
    "power of constants": (lambda x: x * TENTH**0.3, lambda x: x * 0.1**0.3),
    "element of a tuple": (lambda x: x * THIRDS[1] + THIRDS[-2], lambda x: x * (2 / 3) + 1 / 3),
    "local": (with_a_local, lambda x: x * 0.1 / 3),
    "built-in functions": (
        lambda x: x * max(TENTH, abs(-0.3), float(0)) + round(2.5) + int(3.7),
        lambda x: x * 0.3 + 2 + 3,
    ),
    "floor": (lambda x: x * (math.floor(TENTH * 37) + TENTH), lambda x: x * (3 + 0.1)),
    "division by zero": (lambda x: min(x, ONE / ZERO) * 0.1, lambda x: x * 0.1),
    "logarithm of zero": (lambda x: max(x, math.log(ZERO)) * 0.1, lambda x: x * 0.1),
    "root of a negative number": (lambda x: x * math.sqrt(-ONE), lambda x: x * math.nan),
    "overflow": (lambda x: min(x, math.exp(1000 * ONE)) * 0.1, lambda x: x * 0.1),
    "exponent": (lambda x: x ** int(ONE + 1), lambda x: x * x),
    "tenth power": (lambda x: x**10, lambda x: (x * x) * power8(x)),
}


@pytest.fixture(scope="module")
def lib():
    return library.Library("foo_constants", "FRAGMENT")


def define(lib, name, kernel):
    lib.define(f"{name}(Tensor x) -> Tensor")
    library.register_kernel(f"foo_constants::{name}", "cpu", kernel, lib=lib)
    return getattr(torch.ops.foo_constants, name)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_constant_takes_the_type_of_what_it_meets(name, lib):
    function, formula = FORMULAS[name]
    operator = define(lib, f"f{list(FORMULAS).index(name)}", library.elementwise_kernel(function))
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(1003, dtype=dtype)
        torch.testing.assert_close(operator(x), formula(x), rtol=0, atol=0, equal_nan=True)


def test_in_a_comparison(lib):
    """0.1 is a different number in float32."""
    kernel = library.elementwise_kernel(lambda x: 1 if x == 0.1 else 0)
    equal = define(lib, "equal", kernel)
    assert equal(torch.tensor([0.1, 0.2])).tolist() == [1, 0]


def test_integers_stay_integers(lib):
    """Constant integer expressions are integers of up to 64 bits; a quotient is a float."""
    size = 2**31

    def moved(x):
        return x + (size * 4 + 7) // 3 - (size >> 3)

    x = torch.arange(-5, 5)
    kernel = library.elementwise_kernel(moved, dtypes=(torch.int64,))
    assert define(lib, "moved", kernel)(x).equal(x + (2**33 + 7) // 3 - 2**28)


def test_a_variable_is_no_constant(lib):
    """Neither a variable with two values nor a loop counter is a constant."""
    lib.define("steps(Tensor x) -> Tensor")
    library.register_fake("foo_constants::steps", lambda x: torch.empty_like(x), lib=lib)

    @library.register_kernel("foo_constants::steps", "cpu", lib=lib)
    @library.tile_kernel
    def steps(x, output, rows):
        factor = 0.1
        for row in rows:
            for i in range(x.shape[-1]):
                output[row, i] = x[row, i] * math.sqrt(i) + (x[row, i] * factor) * 3
                factor += 0.1

    x = torch.randn(1, 67)
    i = torch.arange(67, dtype=torch.float64)
    factor = torch.full((67,), 0.1, dtype=torch.float64).cumsum(0)
    expected = (x.double() * i.sqrt() + x.double() * factor * 3).float()
    torch.testing.assert_close(torch.ops.foo_constants.steps(x), expected, rtol=1e-7, atol=1e-7)


def test_of_integers_and_complex_numbers(lib):
    integers = library.elementwise_kernel(lambda x: x**3 - 2 * x, dtypes=(torch.int32,))
    x = torch.arange(-50, 50, dtype=torch.int32)
    assert define(lib, "integers", integers)(x).equal(x**3 - 2 * x)
    numbers = library.elementwise_kernel(lambda z: z**2 * 0.1, dtypes=(torch.complex64,))
    z = torch.randn(77, dtype=torch.complex64)
    assert_near(define(lib, "numbers", numbers)(z), z.to(torch.complex128).square() * 0.1)


def test_variables_promote_as_ever(lib):
    """A float argument is float64 in a tile kernel, and so are results computed with it."""
    lib.define("tile(Tensor x, float y) -> Tensor")
    library.register_fake("foo_constants::tile", lambda x, y: torch.empty_like(x), lib=lib)

    @library.register_kernel("foo_constants::tile", "cpu", lib=lib)
    @library.tile_kernel
    def tile(x, y, output, rows):
        for row in rows:
            for i in range(x.shape[-1]):
                output.row(row)[i] = x.row(row)[i] * y

    x = torch.randn(3, 67)
    assert torch.ops.foo_constants.tile(x, 0.1).equal((x.double() * 0.1).float())
