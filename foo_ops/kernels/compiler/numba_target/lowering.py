"""Lower Numba's typed IR to LLVM IR, without reference counting and debugging support."""

from __future__ import annotations

from typing import Any

from llvmlite import ir as llvm_ir
from numba.core import cgutils, ir, lowering, types
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _Lower(lowering.Lower):
    def emit_environment_object(self) -> None:
        """Emit nothing; Numba gives each function a variable for Python objects."""

    def lower_inst(self, inst: ir.Stmt) -> None:
        """Lower a statement, and set its place in the context.

        Numba would also format each statement as text, for messages that nobody reads.
        """
        self.context.place = inst.loc
        if isinstance(inst, ir.Assign):
            name = inst.target.name
            self.storevar(self.lower_assign(self.typeof(name), inst), name)
        else:
            super().lower_inst(inst)

    def storevar(self, value: llvm_ir.Value, name: str, argidx: int | None = None) -> None:
        """Store a value; Numba would also load the old one, to decrement its reference count."""
        self._alloca_var(name, self.typeof(name))
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))

    def alloca_lltype(
        self, name: str, lltype: llvm_ir.Type, datamodel: Any = None
    ) -> llvm_ir.AllocaInstr:
        """Allocate without asking LLVM for the type's size, which debuggers need."""
        return cgutils.alloca_once(self.builder, lltype, name=name)

    def lower_binop(self, resty: types.Type, expr: ir.Expr, op: Any) -> llvm_ir.Value:
        """Lower, without a search for an implementation for constant operands: there is none."""
        if expr.static_lhs is not ir.UNDEFINED or expr.static_rhs is not ir.UNDEFINED:
            return super().lower_binop(resty, expr, op)
        signature = self.fndesc.calltypes[expr]
        typing_context = self.context.typing_context
        function = typing_context.resolve_value_type(op)
        operands = [
            self._cast_var(operand, type_)
            for operand, type_ in zip((expr.lhs, expr.rhs), signature.args)
        ]
        implemented = typing_context.resolve_function_type(function, signature.args, {})
        result = self.context.get_function(function, implemented)(self.builder, operands)
        return self.context.cast(self.builder, result, signature.return_type, resty)


@register_pass(mutates_CFG=True, analysis_only=False)
class Lowering(NativeLowering):
    _name = "foo_ops_lowering"

    @property
    def lowering_class(self) -> type[_Lower]:
        return _Lower
