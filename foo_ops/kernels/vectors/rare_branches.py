"""Functions with a branch that is rarely taken, for loops that LLVM vectorises.

A loop with a branch would not be vectorised, or would compute both sides. So such a function stays
one, and tells LLVM what it is for vectors, which is a function with one branch for all lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from foo_ops.kernels.vectors.elements import lanes_of
from foo_ops.kernels.vectors.instructions import FLOAT, INT32
from foo_ops.kernels.vectors.number import Mask, Number


@dataclass(frozen=True)
class RareBranch:
    """A function of one number.

    Attributes:
        name: of the function, unique among all.
        usual: returns the result, and where it is right.
        rare: returns the result for any number.
    """

    name: str
    usual: Callable[[Number], tuple[Number, Mask]]
    rare: Callable[[Number], Number]

    def of(self, x: Number) -> Number:
        """Emit a call."""
        function = self._function(x.builder.module, x.type)
        if not isinstance(x.type, ir.VectorType):
            self._let_vectorise(function, x)
        return x.made(x.builder.call(function, [x.value]))

    def _function(self, module: ir.Module, type_: ir.Type) -> ir.Function:
        """Return the function for numbers of a type, or for vectors of them."""
        is_vector = isinstance(type_, ir.VectorType)
        element = type_.element if is_vector else type_
        name = f"foo_ops_{self.name}_{'float32' if element == FLOAT else 'float64'}"
        name = f"{name}_{type_.count}" if is_vector else name
        known = module.globals.get(name)
        if known is not None:
            return known
        function = ir.Function(module, ir.FunctionType(type_, [type_]), name)
        # It is in the modules of all functions that call it, and LLVM keeps it until it has
        # vectorised their loops. Inlined after that it is no quicker: the calls of the rare branch
        # leave no registers to the constants of the loop.
        function.linkage = "weak_odr"
        function.attributes.add("noinline")
        for attribute in ("nounwind", "willreturn", "memory(none)"):
            set.add(function.attributes, attribute)
        self._define(function, type_)
        return function

    def _define(self, function: ir.Function, type_: ir.Type) -> None:
        builder = ir.IRBuilder(function.append_basic_block("usual"))
        x = Number(builder, function.args[0])
        usual, is_right = self.usual(x)
        start, rare, end = (
            builder.block,
            *(function.append_basic_block(it) for it in ("rare", "end")),
        )
        builder.cbranch(_in_all_lanes(builder, is_right.value), end, rare)
        builder.position_at_end(rare)
        result = self._each(x) if isinstance(type_, ir.VectorType) else self.rare(x).value
        stop = builder.block
        builder.branch(end)
        builder.position_at_end(end)
        value = builder.phi(type_)
        value.add_incoming(usual.value, start)
        value.add_incoming(result, stop)
        builder.ret(value)

    def _each(self, x: Number) -> ir.Value:
        """Call the function for each lane: so no result depends on those beside it."""
        builder, result = x.builder, x.value
        function = self._function(builder.module, x.type.element)
        for lane in range(x.type.count):
            value = builder.call(function, [builder.extract_element(x.value, INT32(lane))])
            result = builder.insert_element(result, value, INT32(lane))
        return result

    def _let_vectorise(self, function: ir.Function, x: Number) -> None:
        """Tell LLVM the functions for whole vectors, and for half of one beside wider numbers."""
        lanes = lanes_of("float32" if x.type == FLOAT else "float64")
        vectors = [
            self._function(function.module, ir.VectorType(x.type, count))
            for count in (lanes, lanes // 2)
        ]
        # The names are those of the "vector function ABI".
        variants = ",".join(
            f"_ZGV_LLVM_N{it.args[0].type.count}v_{function.name}({it.name})" for it in vectors
        )
        set.add(function.attributes, f'"vector-function-abi-variant"="{variants}"')


def _in_all_lanes(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    if not isinstance(mask.type, ir.VectorType):
        return mask
    bits = ir.IntType(mask.type.count)
    return builder.icmp_unsigned("==", builder.bitcast(mask, bits), ir.Constant(bits, -1))
