"""Functions with a branch that is rarely taken, for loops that LLVM vectorises.

A loop with a branch would not be vectorised, or would compute both sides. For vectors such a
function is one with one branch for all lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from foo_ops.kernels.vectors.instructions import INT32
from foo_ops.kernels.vectors.number import Mask, Number
from foo_ops.kernels.vectors.whole_functions import WholeFunction


@dataclass(frozen=True)
class RareBranch(WholeFunction):
    """A function of one number.

    Attributes:
        usual: returns the result, and where it is right.
        rare: returns the result for any number.
    """

    usual: Callable[[Number], tuple[Number, Mask]]
    rare: Callable[[Number], Number]

    def formula(self, x: Number) -> Number:
        # Inlined after loops are vectorised it is no quicker: the calls of the rare branch leave no
        # registers to the constants of the loop.
        builder = x.builder
        usual, is_right = self.usual(x)
        start, rare, end = (
            builder.block,
            *(builder.append_basic_block(it) for it in ("rare", "end")),
        )
        builder.cbranch(_in_all_lanes(builder, is_right.value), end, rare)
        builder.position_at_end(rare)
        result = self._each(x) if isinstance(x.type, ir.VectorType) else self.rare(x).value
        stop = builder.block
        builder.branch(end)
        builder.position_at_end(end)
        value = builder.phi(x.type)
        value.add_incoming(usual.value, start)
        value.add_incoming(result, stop)
        return x.made(value)

    def _each(self, x: Number) -> ir.Value:
        """Call the function for each lane: so no result depends on those beside it."""
        builder, result = x.builder, x.value
        function = self.function(builder.module, x.type.element)
        for lane in range(x.type.count):
            value = builder.call(function, [builder.extract_element(x.value, INT32(lane))])
            result = builder.insert_element(result, value, INT32(lane))
        return result


def _in_all_lanes(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    if not isinstance(mask.type, ir.VectorType):
        return mask
    bits = ir.IntType(mask.type.count)
    return builder.icmp_unsigned("==", builder.bitcast(mask, bits), ir.Constant(bits, -1))
