"""Functions that stay functions until LLVM has vectorised the loops that call them.

LLVM is told what such a function is for vectors. So it may have a branch, or instructions that LLVM
would not make of scalars. Then those for vectors are inlined, and what does not change in a loop
leaves it: erf reads six tables, with which gelu of float32 takes 1.4 times as long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from llvmlite import ir

from foo_ops.kernels.vectors.elements import lanes_of
from foo_ops.kernels.vectors.instructions import FLOAT
from foo_ops.kernels.vectors.number import Number


@dataclass(frozen=True)
class WholeFunction(ABC):
    """A function of one number.

    Attributes:
        name: of the function, unique among all.
    """

    name: str

    @abstractmethod
    def formula(self, x: Number) -> Number:
        """Emit the function's body, the same for scalars and vectors, with blocks if need be."""

    def of(self, x: Number) -> Number:
        """Emit a call."""
        function = self.function(x.builder.module, x.type)
        if not isinstance(x.type, ir.VectorType):
            self._let_vectorise(function, x)
        is_vector = isinstance(x.type, ir.VectorType)
        attributes = () if is_vector else ("noinline",)
        return x.made(x.builder.call(function, [x.value], attrs=attributes))

    def function(self, module: ir.Module, type_: ir.Type) -> ir.Function:
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
        # vectorised their loops. The calls of scalars alone must not be inlined before.
        function.linkage = "weak_odr"
        function.attributes.add("alwaysinline" if is_vector else "noinline")
        for attribute in ("nounwind", "willreturn", "memory(none)"):
            set.add(function.attributes, attribute)
        builder = ir.IRBuilder(function.append_basic_block("start"))
        builder.ret(self.formula(Number(builder, function.args[0])).value)
        return function

    def _let_vectorise(self, function: ir.Function, x: Number) -> None:
        """Tell LLVM the functions for whole vectors, and for half of one beside wider numbers."""
        lanes = lanes_of("float32" if x.type == FLOAT else "float64")
        vectors = [
            self.function(function.module, ir.VectorType(x.type, count))
            for count in (lanes, lanes // 2)
        ]
        # The names are those of the "vector function ABI".
        variants = ",".join(
            f"_ZGV_LLVM_N{it.args[0].type.count}v_{function.name}({it.name})" for it in vectors
        )
        set.add(function.attributes, f'"vector-function-abi-variant"="{variants}"')
