"""Functions that stay functions until LLVM has vectorised the loops that call them.

LLVM is told what such a function is for vectors. So it may have a branch, or instructions that LLVM
would not make of scalars. Then those for vectors are inlined, and what does not change in a loop
leaves it: erf reads six tables, with which gelu of float32 takes 1.4 times as long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from llvmlite import ir

from foo_ops.kernels.compiler.processor import vector_bits
from foo_ops.kernels.vectors.instructions import bits_of, suffix
from foo_ops.kernels.vectors.number import Number


@dataclass(frozen=True)
class WholeFunction(ABC):
    """A function of numbers of one type, which is that of the result.

    Attributes:
        name: of the function, unique among all.
    """

    name: str

    @abstractmethod
    def formula(self, *numbers: Number) -> Number:
        """Emit the function's body, the same for scalars and vectors, with blocks if need be."""

    def of(self, *numbers: Number) -> Number:
        """Emit a call."""
        first = numbers[0]
        function = self.function(first.builder.module, first.type, len(numbers))
        is_vector = isinstance(first.type, ir.VectorType)
        if not is_vector:
            self._let_vectorise(function, first.type, len(numbers))
        attributes = () if is_vector else ("noinline",)
        values = [number.value for number in numbers]
        return first.made(first.builder.call(function, values, attrs=attributes))

    def function(self, module: ir.Module, type_: ir.Type, count: int) -> ir.Function:
        """Return the function for ``count`` numbers of a type, or vectors of them."""
        is_vector = isinstance(type_, ir.VectorType)
        name = f"foo_ops_{self.name}_{suffix(type_)}"
        known = module.globals.get(name)
        if known is not None:
            return known
        function = ir.Function(module, ir.FunctionType(type_, [type_] * count), name)
        # It is in the modules of all functions that call it, and LLVM keeps it until it has
        # vectorised their loops. The calls of scalars alone must not be inlined before.
        function.linkage = "weak_odr"
        function.attributes.add("alwaysinline" if is_vector else "noinline")
        for attribute in ("nounwind", "willreturn", "memory(none)"):
            set.add(function.attributes, attribute)
        builder = ir.IRBuilder(function.append_basic_block("start"))
        result = self.formula(*(Number(builder, argument) for argument in function.args))
        builder.ret(result.value)
        return function

    def _let_vectorise(self, function: ir.Function, type_: ir.Type, count: int) -> None:
        """Tell LLVM the functions for whole vectors, and for half of one beside wider numbers."""
        lanes = vector_bits() // bits_of(type_)
        vectors = [
            self.function(function.module, ir.VectorType(type_, lanes), count)
            for lanes in (lanes, lanes // 2)
        ]
        # The names are those of the "vector function ABI".
        variants = ",".join(
            f"_ZGV_LLVM_N{it.args[0].type.count}{'v' * count}_{function.name}({it.name})"
            for it in vectors
        )
        set.add(function.attributes, f'"vector-function-abi-variant"="{variants}"')
