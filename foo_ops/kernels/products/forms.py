"""Choose in which form the factors of a tile's product are packed, and what multiplies them.

A matrix unit takes products of bfloat16, and of integers of 8 bits: they are quicker there for all
sizes (64 x 64 x 64 in bfloat16 1.4 times, 256 x 256 x 256 six times; 8 rows 1.5 times). Without
one, integers of 8 and 16 bits are multiplied in pairs of 16 bits, and bfloat16 in pairs where the
processor is quick with them. All others are multiplied in the compute type of the sums.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from numba.core import errors, types

from foo_ops.kernels.compiler.processor import use_matrix_unit, use_pairs
from foo_ops.kernels.products.on_amx import GROUP, make_amx_products, make_amx_products_of_bytes
from foo_ops.kernels.products.operands import make_products_on_vectors
from foo_ops.kernels.vectors.elements import ELEMENTS, lanes_of
from foo_ops.kernels.vectors.pairs import INTEGER_PAIRS, PAIRS

# Of a row of a block, at most: a panel of such columns lies in the nearest cache. With twice as
# many, 128 x 256 x 1024 in float32 takes 1.1 times as long.
BLOCK_BYTES = 512
_BYTES = {"bool", "int8", "uint8"}
# What the elements of pairs hold exactly, so that it enters products in pairs beside them.
_EXACT_IN_BFLOAT16, _EXACT_IN_INT16 = {"bfloat16"} | _BYTES, {"int16"} | _BYTES


@dataclasses.dataclass(frozen=True)
class Form:
    """How factors lie in memory when they are multiplied.

    Attributes:
        compute: the dtype of the sums.
        left, right: the dtypes of the elements of both factors.
        unit: the dtype of a step, of one or several elements.
        on_unit: a matrix unit multiplies.
    """

    compute: str
    left: str
    right: str
    unit: str
    on_unit: bool

    @property
    def step(self) -> int:
        """How many elements a step sums over."""
        return ELEMENTS[self.unit].parts

    @property
    def depth(self) -> int:
        """The elements of a block that are summed over."""
        return BLOCK_BYTES // ELEMENTS[self.left].size

    @property
    def row_multiple(self) -> int:
        return GROUP if self.on_unit else 1

    @property
    def column_multiple(self) -> int:
        return GROUP if self.on_unit else lanes_of(self.compute)

    @property
    def depth_multiple(self) -> int:
        return self.step * (GROUP if self.on_unit else 1)

    def make_products(self) -> tuple[Callable, Callable, Callable]:
        """Make what `foo_ops.kernels.products.operands.make_products` does."""
        if not self.on_unit:
            return make_products_on_vectors(self.compute, self.unit)
        if self.unit == PAIRS:
            return make_amx_products(1)
        return make_amx_products_of_bytes(self.left, self.right)


@functools.cache
def form_of(a: str, b: str) -> Form:
    """Return the form for factors of two dtypes."""
    both, compute, on_unit = {a, b}, _sums_dtype(a, b), use_matrix_unit()
    if "bfloat16" in both and both <= _EXACT_IN_BFLOAT16 and (on_unit or use_pairs()):
        return Form(compute, "bfloat16", "bfloat16", PAIRS, on_unit)
    if both <= _BYTES and on_unit:
        left, right = (str(ELEMENTS[dtype].compute) for dtype in (a, b))
        return Form(compute, left, right, "int8x4", True)
    if both <= _EXACT_IN_INT16:
        return Form(compute, "int16", "int16", INTEGER_PAIRS, False)
    return Form(compute, compute, compute, compute, False)


def _sums_dtype(a: str, b: str) -> str:
    """Return the dtype in which products of two dtypes are summed."""
    computed = [ELEMENTS[dtype].compute for dtype in (a, b)]
    for type_ in computed:
        if not isinstance(type_, (types.Float, types.Integer)):
            raise errors.TypingError(f"dot: a factor must be of real numbers, got {type_}")
    floats = [type_ for type_ in computed if isinstance(type_, types.Float)]
    if floats:
        return str(max(floats))
    return "int32" if all(type_.bitwidth <= 16 for type_ in computed) else "int64"
