"""Divide floating-point numbers as Python does, with a remainder that has no error.

Of a quotient with fewer digits than a number has the integer part is right, or one too large. Then
the remainder is one fma away, and it shows which. Larger quotients are left to the C library.
"""

from __future__ import annotations

import math

from foo_ops.kernels.vectors.functions import format_of
from foo_ops.kernels.vectors.number import Mask, Number, make_function
from foo_ops.kernels.vectors.rare_branches import RareBranch


def _divided(x: Number, y: Number) -> tuple[Number, Number, Mask]:
    """Return the integer part of |x / y| and what is left of |x|, and where these are right."""
    x, y = abs(x), abs(y)
    quotient = (x / y).truncated()
    rest = (-quotient).fma(y, x)
    is_too_large = rest < 0.0
    rest = is_too_large.choose(rest + y, rest)
    # Of an infinite y, too.
    rest = (x < y).choose(x, rest)
    is_huge = ~(quotient < 2.0 ** (format_of(x.value).mantissa_bits + 1))
    is_undefined = ~((x < math.inf) & (y > 0.0))
    return is_too_large.choose(quotient - 1.0, quotient), rest, ~is_huge | is_undefined


def _usual_fmod(x: Number, y: Number) -> tuple[Number, Mask]:
    _, rest, is_right = _divided(x, y)
    return rest.with_sign_of(x), is_right


def _rare_fmod(x: Number, y: Number) -> Number:
    return x.made(x.builder.frem(x.value, y.value))


def _usual_remainder(x: Number, y: Number) -> tuple[Number, Mask]:
    _, rest, is_right = _divided(x, y)
    return _turned(rest, x, y), is_right


def _turned(rest: Number, x: Number, y: Number) -> Number:
    """Return the remainder that has the sign of y, of that of the magnitudes."""
    is_turned = x.differs_in_sign(y) & ~rest.equals(0.0)
    return is_turned.choose(abs(y) - rest, rest).with_sign_of(y)


def _rare_remainder(x: Number, y: Number) -> Number:
    return _turned(abs(_rare_fmod(x, y)), x, y)


def _usual_floor_divide(x: Number, y: Number) -> tuple[Number, Mask]:
    quotient, rest, is_right = _divided(x, y)
    differ = x.differs_in_sign(y)
    quotient = (differ & ~rest.equals(0.0)).choose(quotient + 1.0, quotient)
    quotient = differ.choose(-quotient, quotient)
    # No multiple of y is near infinity.
    is_lost = abs(x).equals(math.inf) & ~y.equals(0.0)
    return is_lost.choose(x.constant(math.nan), quotient), is_right


def _rare_floor_divide(x: Number, y: Number) -> Number:
    # Larger than all numbers with digits behind the point.
    return (x - _rare_remainder(x, y)) / y


_FMOD = RareBranch("fmod", _usual_fmod, _rare_fmod)
_REMAINDER = RareBranch("remainder", _usual_remainder, _rare_remainder)
_FLOOR_DIVIDE = RareBranch("floor_divide", _usual_floor_divide, _rare_floor_divide)


@make_function
def fmod(x: Number, y: Number) -> Number:
    """Compute x less the multiple of y that is next to it towards zero, without an error.

    The result has the sign of x. It is NaN where x is infinite or y is 0, and x for an infinite y.

    Example:
        >>> y[i] = language.fmod(x[i], language.cast(2.5, x))
    """
    return _FMOD.of(x, y)


@make_function
def remainder(x: Number, y: Number) -> Number:
    """Compute x % y as Python does: x less the multiple of y that is next below.

    The result has the sign of y, and half a unit in the last place of error where x has not. It is
    NaN where x is infinite or y is 0.

    Example:
        >>> y[i] = language.remainder(x[i], language.cast(2.5, x))
    """
    return _REMAINDER.of(x, y)


@make_function
def floor_divide(x: Number, y: Number) -> Number:
    """Compute x // y as Python does, the integer part of the exact quotient, rounded down.

    The result is x / y where y is 0, else NaN where x is infinite.

    Example:
        >>> y[i] = language.floor_divide(x[i], language.cast(2.5, x))
    """
    return _FLOOR_DIVIDE.of(x, y)
