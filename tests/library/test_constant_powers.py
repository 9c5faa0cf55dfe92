"""Powers with constant exponents in kernels."""

import math

import pytest
import torch

from foo_ops import library

POWERS = {
    "minus one": (lambda x: x**-1, lambda x: 1 / x),
    "minus three": (lambda x: x**-3, lambda x: (1 / x) * ((1 / x) * (1 / x))),
    "float exponent": (lambda x: x**2.0, lambda x: x * x),
    "math.pow": (lambda x: math.pow(x, 2), lambda x: x * x),
    "pow": (lambda x: pow(x, 3), lambda x: x * (x * x)),
}


@pytest.mark.parametrize("name", POWERS)
def test_constant_powers_are_products(name):
    function, expected = POWERS[name]

    @library.numba_op(f"foo_math::power_{name.replace(' ', '_').replace('.', '_')}")
    def operator(x: float) -> float:
        return function(x)

    # 1e19 ** 3 overflows float32 and 1e-57 underflows, but 1e13 ** -3 does not.
    x = torch.tensor([2.0, -3.0, 0.1, 1e19, 1e13, 1e-20, math.inf, -0.0, math.nan])
    torch.testing.assert_close(operator(x), expected(x), rtol=0, atol=0, equal_nan=True)
