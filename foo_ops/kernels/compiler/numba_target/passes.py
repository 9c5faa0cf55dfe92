"""The Numba passes that a kernel needs, without the parts for other programs.

Numba repeats the analysis of variables' lifetimes after each of four passes. Except in generators,
only lifted loops, object mode and deletions use it, and a kernel has none of them.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from numba.core import bytecode, errors, interpreter, ir, transforms
from numba.core.compiler_machinery import CompilerPass, PassManager, register_pass
from numba.core.ir_utils import build_definitions, get_definition, guard
from numba.core.rewrites.registry import rewrite_registry
from numba.core.ssa import reconstruct_ssa
from numba.core.typed_passes import (
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

from foo_ops.kernels.compiler.numba_target.constants import AdaptConstants
from foo_ops.kernels.compiler.numba_target.lowering import Lowering
from foo_ops.kernels.compiler.numba_target.texts import fold_comparisons


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
