"""The Numba passes that a kernel needs, without the parts for other programs.

Numba repeats the analysis of variables' lifetimes after each of four passes. Except in generators,
only lifted loops, object mode and deletions use it, and a kernel has none of them.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NoReturn

from llvmlite import ir as llvm_ir
from numba.core import bytecode, cgutils, errors, interpreter, ir, lowering, transforms, types
from numba.core.callconv import BaseCallConv, Status
from numba.core.compiler_machinery import CompilerPass, PassManager, register_pass
from numba.core.ir_utils import build_definitions, get_definition, guard
from numba.core.rewrites.registry import rewrite_registry
from numba.core.ssa import reconstruct_ssa
from numba.core.typed_passes import (
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    InlineClosureLikes,
    IRProcessing,
    MakeFunctionToJitFunction,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)

from foo_ops.kernels.compiler.numba_target.constants import AdaptConstants, fold_comparisons

# ------------------------------------------------------------------------------- calling convention

# Functions of a kernel return their value, and nothing else.
#
# Numba's own functions also return a status, and take pointers for the exception they raise and for
# their value. A kernel cannot raise, and without these LLVM has a seventh fewer lines to read and
# to remove (14337 to 12249 in attention's forward kernel).


_TRUE, _FALSE = (llvm_ir.Constant(llvm_ir.IntType(1), value) for value in (1, 0))
_SUCCESS = Status(
    code=llvm_ir.Constant(llvm_ir.IntType(32), 0),
    is_ok=_TRUE,
    is_none=_FALSE,
    is_error=_FALSE,
    is_stop_iteration=_FALSE,
    is_python_exc=_FALSE,
    is_user_exc=_FALSE,
    excinfoptr=llvm_ir.Constant(llvm_ir.IntType(8).as_pointer(), None),
)


class CallingConvention(BaseCallConv):
    """Calls a function as a C function of the arguments' components."""

    def _make_call_helper(self, builder: llvm_ir.IRBuilder) -> None:
        """Return None: this convention needs no helper."""

    def get_function_type(self, restype: types.Type, argtypes: Any) -> llvm_ir.FunctionType:
        arguments = self._get_arg_packer(argtypes).argument_types
        return llvm_ir.FunctionType(self.get_return_type(restype).pointee, list(arguments))

    def decorate_function(
        self, fn: llvm_ir.Function, args: Any, fe_argtypes: Any, noalias: bool = False
    ) -> None:
        self._get_arg_packer(fe_argtypes).assign_names(fn.args, [f"arg.{name}" for name in args])

    def get_arguments(self, func: llvm_ir.Function) -> Any:
        return func.args

    def call_function(
        self,
        builder: llvm_ir.IRBuilder,
        callee: llvm_ir.Function,
        resty: types.Type,
        argtys: Any,
        args: Any,
        attrs: Any = None,
    ) -> tuple[Status, llvm_ir.Value]:
        arguments = self._get_arg_packer(argtys).as_arguments(builder, args)
        value = builder.call(callee, arguments, attrs=attrs or ())
        return _SUCCESS, self.context.get_returned_value(builder, resty, value)

    def return_value(self, builder: llvm_ir.IRBuilder, retval: llvm_ir.Value) -> None:
        builder.ret(retval)

    def return_native_none(self, builder: llvm_ir.IRBuilder) -> NoReturn:
        raise TypeError("a function must return a value on every path or on none")

    def return_status_propagate(self, builder: llvm_ir.IRBuilder, status: Status) -> None:
        """End the branch for a failed call, which is never taken."""
        builder.unreachable()

    def return_user_exc(
        self,
        builder: llvm_ir.IRBuilder,
        exc: type[BaseException],
        exc_args: Any = None,
        loc: Any = None,
        func_name: str | None = None,
    ) -> None:
        """Return zero where Numba's own code would raise, as range does for a step of zero."""
        builder.ret(llvm_ir.Constant(builder.function.function_type.return_type, None))


# ----------------------------------------------------------------------------------------- lowering

# Numba's typed IR becomes LLVM IR, without reference counting and debugging support.


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


# ------------------------------------------------------------------------------------------- passes


class _Passes(PassManager):
    def _runPass(self, index: int, pss: CompilerPass, internal_state: Any) -> None:  # noqa: N802
        """Run a pass without Numba's clocks, listeners and descriptions."""
        pss.analysis = self._analysis
        with errors.new_error_context("Pass {name}", name=pss.name()):
            pss.run_initialization(internal_state)
            pss.run_pass(internal_state)
            pss.run_finalizer(internal_state)


@functools.cache
def pipeline(name: str) -> PassManager:
    """Make the pass pipeline, without with, exceptions, literal_unroll, inlining and arrays."""
    passes = _Passes(name)
    passes.add_pass(_Translate, "translate bytecode to Numba's IR")
    passes.add_pass(FixupArgs, "mend arguments")
    passes.add_pass(_ProcessIR, "process Numba's IR")
    passes.add_pass(_InlineClosures, "inline closures")
    passes.add_pass(_ReplaceConstants, "replace expressions that are constant")
    passes.add_pass(DeadBranchPrune, "remove branches that are never taken")
    passes.add_pass(_Rewrite, "rewrite items at constant indices")
    passes.add_pass(MakeFunctionToJitFunction, "make functions of closures")
    passes.add_pass(_AssignOnce, "assign each variable once")
    passes.add_pass(AdaptConstants, "give constants the types of what they meet")
    passes.add_pass(NopythonTypeInference, "infer types")
    passes.add_pass(_StripPhis, "replace phi nodes by variables")
    passes.add_pass(Lowering, "make LLVM IR")
    passes.add_pass(_HandOut, "hand out the function")
    passes.finalize()
    return passes


class _Interpreter(interpreter.Interpreter):
    def post_process(self, peepholes: list[Any], func_ir: ir.FunctionIR) -> ir.FunctionIR:
        has_with = any(step.opname.endswith("_WITH") for step in self.bytecode)
        if not has_with:
            peepholes = [
                peephole
                for peephole in peepholes
                if peephole is not interpreter.peep_hole_delete_with_exit
            ]
        return super().post_process(peepholes, func_ir)


@register_pass(mutates_CFG=True, analysis_only=False)
class _Translate(TranslateByteCode):
    _name = "foo_ops_translate"

    def run_pass(self, state: Any) -> bool:
        _skip_caches(state.bc)
        state.func_ir = _Interpreter(state.func_id).interpret(state.bc)
        return True


def _skip_caches(code: bytecode.ByteCode) -> None:
    """Remove the CACHE entries of Python 3.11, half of its bytecode.

    Numba removes them for later versions.
    """
    steps = [step for step in code if step.opname != "CACHE"]
    for step, following in itertools.pairwise(steps):
        step.next = following.offset
    code.table = type(code.table)((step.offset, step) for step in steps)


@register_pass(mutates_CFG=True, analysis_only=False)
class _ProcessIR(IRProcessing):
    _name = "foo_ops_process_ir"

    def run_pass(self, state: Any) -> bool:
        if state.func_ir.is_generator:
            return super().run_pass(state)
        state.func_ir.blocks = transforms.canonicalize_cfg(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _InlineClosures(InlineClosureLikes):
    """Inline closures only if there are any: Numba's pass takes 4 ms for each function."""

    _name = "foo_ops_inline_closures"

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks.values()
        has_closures = any(True for block in blocks for _ in block.find_exprs(op="make_function"))
        return has_closures and super().run_pass(state)


@register_pass(mutates_CFG=True, analysis_only=False)
class _ReplaceConstants(RewriteSemanticConstants):
    """Also replace ``x.ndim``, if an argument's type has it, and comparisons of texts.

    A branch for another number of dimensions, or another text, is then removed, and not compiled.
    """

    _name = "foo_ops_replace_constants"

    def run_pass(self, state: Any) -> bool:
        super().run_pass(state)
        definitions = state.func_ir._definitions
        for block in state.func_ir.blocks.values():
            for assignment in block.find_insts(ir.Assign):
                expression: Any = assignment.value
                if not isinstance(expression, ir.Expr) or expression.op != "getattr":
                    continue
                argument = guard(get_definition, state.func_ir, expression.value)
                if expression.attr == "ndim" and isinstance(argument, ir.Arg):
                    dimensions = getattr(state.args[argument.index], "ndim", None)
                    if dimensions is not None:
                        assignment.value = ir.Const(dimensions, assignment.loc)
                        definitions[assignment.target.name] = [assignment.value]
        fold_comparisons(state)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Rewrite(GenericRewrites):
    _name = "foo_ops_rewrite"

    def run_pass(self, state: Any) -> bool:
        if state.func_ir.is_generator:
            return super().run_pass(state)
        blocks = state.func_ir.blocks
        for make_rewrite in rewrite_registry.rewrites["before-inference"]:
            rewrite = make_rewrite(state)
            for label in list(blocks):
                while rewrite.match(state.func_ir, blocks[label], state.typemap, state.calltypes):
                    blocks[label] = rewrite.apply()
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class _AssignOnce(ReconstructSSA):
    _name = "foo_ops_assign_once"

    def run_pass(self, state: Any) -> bool:
        if state.func_ir.is_generator:
            return super().run_pass(state)
        state.func_ir = reconstruct_ssa(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class _StripPhis(PreLowerStripPhis):
    _name = "foo_ops_strip_phis"

    def run_pass(self, state: Any) -> bool:
        if state.func_ir.is_generator:
            return super().run_pass(state)
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _HandOut(NoPythonBackend):
    """Return the function without the types of its parts, which keep Numba's IR alive."""

    _name = "foo_ops_hand_out"

    def run_pass(self, state: Any) -> bool:
        super().run_pass(state)
        state.cr.fndesc.typemap = state.cr.fndesc.calltypes = None
        return True
