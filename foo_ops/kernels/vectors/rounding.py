"""Round floating-point numbers to integers, which stay floating-point numbers, and take roots.

Python's ``math.floor`` returns an int, which has room for every float. A kernel has 64 bits for an
integer, into which 1e30, infinity and NaN do not fit; as a float of its argument's type the result
is right for all of them, and in float32 what follows stays float32.
"""

from __future__ import annotations

from foo_ops.kernels.vectors.number import Number, make_function


@make_function
def floor(x: Number) -> Number:
    """Return the largest integer that is not above x, in x's type; NaN for NaN.

    Example:
        >>> y[i] = x[i] - language.floor(x[i])
    """
    return x.floor()


@make_function
def ceil(x: Number) -> Number:
    """Return the smallest integer that is not below x, in x's type; NaN for NaN.

    Example:
        >>> y[i] = language.ceil(x[i])
    """
    return x.ceil()


@make_function
def trunc(x: Number) -> Number:
    """Return the integer part of x, in x's type; NaN for NaN.

    Example:
        >>> y[i] = x[i] - language.trunc(x[i])
    """
    return x.truncated()


@make_function
def round(x: Number) -> Number:
    """Return the integer nearest to x, and of two the even one, in x's type; NaN for NaN.

    Example:
        >>> y[i] = language.round(x[i] * 127)
    """
    return x.nearest()


@make_function
def sqrt(x: Number) -> Number:
    """Compute the square root, within half a unit in the last place; NaN for less than zero.

    Example:
        >>> y[i] = language.sqrt(x[i] * x[i] + 1)
    """
    return x.square_root()
