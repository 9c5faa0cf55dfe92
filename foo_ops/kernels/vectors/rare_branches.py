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
    """A function of numbers.

    Attributes:
        usual: returns the result, and where it is right.
        rare: returns the result for any numbers.
    """

    usual: Callable[..., tuple[Number, Mask]]
    rare: Callable[..., Number]

    def formula(self, *numbers: Number) -> Number:
        # Inlined after loops are vectorised it is no quicker: the calls of the rare branch leave no
        # registers to the constants of the loop.
        x, builder = numbers[0], numbers[0].builder
        usual, is_right = self.usual(*numbers)
        start, rare, end = (
            builder.block,
            *(builder.append_basic_block(it) for it in ("rare", "end")),
        )
        builder.cbranch(_in_all_lanes(builder, is_right.value), end, rare)
        builder.position_at_end(rare)
        is_vector = isinstance(x.type, ir.VectorType)
        result = self.rare_of_lanes(*numbers) if is_vector else self.rare(*numbers).value
        stop = builder.block
        builder.branch(end)
        builder.position_at_end(end)
        value = builder.phi(x.type)
        value.add_incoming(usual.value, start)
        value.add_incoming(result, stop)
        return x.made(value)

    def rare_of_lanes(self, *numbers: Number) -> ir.Value:
        """Call the function for each lane: so no result depends on those beside it."""
        builder, vector = numbers[0].builder, numbers[0].type
        function = self.function(builder.module, vector.element, len(numbers))
        result = numbers[0].value
        for lane in map(INT32, range(vector.count)):
            values = [builder.extract_element(number.value, lane) for number in numbers]
            result = builder.insert_element(result, builder.call(function, values), lane)
        return result


def _in_all_lanes(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    if not isinstance(mask.type, ir.VectorType):
        return mask
    bits = ir.IntType(mask.type.count)
    return builder.icmp_unsigned("==", builder.bitcast(mask, bits), ir.Constant(bits, -1))
