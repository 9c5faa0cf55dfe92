"""A target of Numba for kernels: it turns a function and all that it calls into one LLVM module.

Numba's own target for processors makes machine code of each function on its way, together with
wrappers for calls from Python, and links and optimises again for each function that calls it. A
kernel needs none of that but the whole, once, at the end: a tenth of a second for a function and
not a fifth.

Functions are written with plain ``numba.njit``. Arguments that are constants are typed as any
other number is, so that a function is compiled once and not for each constant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import _dynfunc
from numba.core import cgutils, codegen, compiler, cpu, externals, types
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.descriptors import TargetDescriptor
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher
from numba.core.target_extension import (
    CPU,
    dispatcher_registry,
    jit_registry,
    target_override,
    target_registry,
)
from numba.core.typed_passes import (
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.typing import builtins as builtins_of_numba  # noqa: F401
from numba.core.typing import mathdecl, templates
from numba.core.typing.context import BaseContext
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
from numba.cpython import (  # noqa: F401
    builtins,
    iterators,
    mathimpl,
    numbers,
    rangeobj,
    tupleobj,
)

from foo_ops.kernels.calling_convention import CallingConvention
from foo_ops.kernels.constants import AdaptConstants
from foo_ops.kernels.target import target

NAME = "foo_ops kernel"


class _Library(codegen.CodeLibrary):
    """The IR of a function, and the libraries of those that it calls."""

    def __init__(self, codegen: codegen.Codegen, name: str) -> None:
        super().__init__(codegen, name)
        self._modules: list[ir.Module] = []
        self._called: list[_Library] = []

    def add_ir_module(self, ir_module: ir.Module) -> None:
        self._modules.append(ir_module)

    def add_linking_library(self, library: _Library) -> None:
        self._called.append(library)

    def finalize(self) -> None:
        self._finalized = True

    def get_function(self, name: str) -> ir.Function:
        return next(module.globals[name] for module in self._modules if name in module.globals)

    def get_llvm_str(self) -> str:
        return "\n".join(map(str, self._modules))

    def get_asm_str(self) -> str:
        raise NotImplementedError("a function of a kernel is assembled with the whole kernel")

    def modules(self) -> Iterator[ir.Module]:
        """Of this function and of all that it calls, each once."""
        seen, waiting = {self}, [self]
        while waiting:
            library = waiting.pop()
            yield from library._modules
            called = dict.fromkeys(other for other in library._called if other not in seen)
            seen.update(called)
            waiting += called


class _Codegen(codegen.Codegen):
    """Makes modules, for the processor that kernels are compiled for."""

    _library_class = _Library

    def __init__(self) -> None:
        codegen.initialize_llvm()
        self._triple, name, features = target()
        machine = llvm.Target.from_triple(self._triple).create_target_machine(name, features)
        self._target_data = machine.target_data

    def _create_empty_module(self, name: str) -> ir.Module:
        module = ir.Module(cgutils.normalize_ir_text(name))
        module.triple, module.data_layout = self._triple, str(self._target_data)
        return module

    def _add_module(self, module: llvm.ModuleRef) -> None:
        raise NotImplementedError("the modules of a kernel are not executed one by one")


class _RefreshedIfNew:
    """Numba refreshes its contexts 1200 times for a kernel of attention, a tenth of its time."""

    _registries: Mapping[Any, Any]
    _known = -1

    def refresh(self) -> None:
        count = self._registrations()
        if self._known != count:
            super().refresh()  # type: ignore[misc]
            # Not the count of now: what refresh itself imports may come too late for it.
            self._known = count

    def _registrations(self) -> int:
        """How many functions, attributes and the like are in the registries of this context."""
        return sum(
            len(getattr(registry, item))
            for registry, loader in self._registries.items()
            for item in loader.registry_items
        )


class _TypingContext(_RefreshedIfNew, BaseContext):
    def _load_builtins(self) -> None:
        """What is imported here, and not arrays, sets and dictionaries: that takes 0.4 s."""
        self.install_registry(templates.builtin_registry)

    def load_additional_registries(self) -> None:
        self.install_registry(mathdecl.registry)

    def resolve_value_type(self, value: Any) -> types.Type:
        if isinstance(value, CPUDispatcher):
            value = _dispatcher_of(value)
        return super().resolve_value_type(value)


class _Context(_RefreshedIfNew, cpu.CPUContext):
    def init(self) -> None:
        self.is32bit = False
        self._sizes: dict[str, int] = {}
        self._internal_codegen = _Codegen()
        externals.c_math_functions.install(self)

    def load_additional_registries(self) -> None:
        self.install_registry(mathimpl.registry)

    def get_abi_sizeof(self, ty: ir.Type) -> int:
        """Kept, since LLVM parses a module for the answer, and is asked for each variable."""
        name = str(ty)
        if name not in self._sizes:
            self._sizes[name] = super().get_abi_sizeof(ty)
        return self._sizes[name]

    @property
    def call_conv(self) -> CallingConvention:
        return CallingConvention(self)

    def post_lowering(self, module: ir.Module, library: _Library) -> None:
        """Numba's runtime, which counts references, is not linked in."""

    def create_cpython_wrapper(self, *args: Any, **kwargs: Any) -> None:
        """Nobody calls a function of a kernel from Python."""

    def create_cfunc_wrapper(self, *args: Any, **kwargs: Any) -> None:
        """The kernel as a whole gets one."""

    def get_executable(self, library: _Library, fndesc: Any, env: Any) -> Any:
        """What tells compiled functions apart. There is no machine code to call yet."""
        return _dynfunc.make_function(
            fndesc.lookup_module(), fndesc.qualname.split(".")[-1], "", 0, env, (library,)
        )


class _Descriptor(TargetDescriptor):
    options = cpu.CPUTargetOptions

    @functools.cached_property
    def typing_context(self) -> _TypingContext:
        return _TypingContext()

    @functools.cached_property
    def target_context(self) -> _Context:
        return _Context(self.typing_context, NAME)


class _Target(CPU):
    """Takes what is registered for all processors."""


_descriptor = _Descriptor(NAME)


class _Dispatcher(Dispatcher):
    targetdescr = _descriptor

    def get_call_template(self, args: Any, kws: Any) -> Any:
        args = tuple(map(types.unliteral, args))
        return super().get_call_template(args, {name: types.unliteral(kws[name]) for name in kws})


@functools.cache
def _dispatcher_of(function: CPUDispatcher) -> _Dispatcher:
    return _jit(**function.targetoptions)(function.py_func)


def _jit(**options: Any) -> Callable[[Callable], _Dispatcher]:
    options = {**options, "error_model": "numpy"}
    return lambda function: _Dispatcher(function, {}, options, _Compiler)


target_registry[NAME] = _Target
dispatcher_registry[_Target] = _Dispatcher
jit_registry[_Target] = _jit


@register_pass(mutates_CFG=True, analysis_only=False)
class _InlineClosures(InlineClosureLikes):
    """Only where there are any: to look for them takes 4 ms a function."""

    _name = "foo_ops_inline_closures"

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks.values()
        has_closures = any(True for block in blocks for _ in block.find_exprs(op="make_function"))
        return has_closures and super().run_pass(state)


class _Compiler(compiler.CompilerBase):
    """Numba's passes, but for those that serve what a kernel does not have.

    Which is: with, exceptions, literal_unroll and literally, inlining by Numba, arrays.
    """

    def define_pipelines(self) -> list[PassManager]:
        pipeline = PassManager(NAME)
        pipeline.add_pass(TranslateByteCode, "translate bytecode to Numba's IR")
        pipeline.add_pass(FixupArgs, "mend arguments")
        pipeline.add_pass(IRProcessing, "process Numba's IR")
        pipeline.add_pass(_InlineClosures, "inline closures")
        pipeline.add_pass(RewriteSemanticConstants, "replace expressions that are constant")
        pipeline.add_pass(DeadBranchPrune, "remove branches that are never taken")
        pipeline.add_pass(GenericRewrites, "rewrite items at constant indices")
        pipeline.add_pass(MakeFunctionToJitFunction, "make functions of closures")
        pipeline.add_pass(ReconstructSSA, "assign each variable once")
        pipeline.add_pass(AdaptConstants, "give constants the types of what they meet")
        pipeline.add_pass(NopythonTypeInference, "infer types")
        pipeline.add_pass(PreLowerStripPhis, "replace phi nodes by variables")
        pipeline.add_pass(NativeLowering, "make LLVM IR")
        pipeline.add_pass(NoPythonBackend, "hand out the function")
        pipeline.finalize()
        return [pipeline]


def compile_module(
    function: Callable[..., None], argument_types: tuple[types.Type, ...], entry: str
) -> llvm.ModuleRef:
    """The LLVM module of a function, which a C function ``entry`` calls with its arguments.

    To be used under Numba's global compiler lock.
    """
    flags = compiler.Flags()
    # A division by zero gives infinity or NaN, as in NumPy: a kernel has nobody to raise to.
    flags.error_model = "numpy"
    context = _descriptor.target_context
    # Without the override, Numba loads its own target too, and with it all that it knows of arrays.
    with target_override(NAME):
        result = compiler.compile_extra(
            _descriptor.typing_context, context, function, argument_types, types.void, flags, {},
            pipeline_class=_Compiler,
        )  # fmt: skip
    wrapper = _c_wrapper(context, result, argument_types, entry)
    whole = llvm.parse_assembly(str(wrapper))
    for module in result.library.modules():
        whole.link_in(llvm.parse_assembly(cgutils.normalize_ir_text(str(module))))
    whole.verify()
    return whole


def _c_wrapper(
    context: _Context, result: Any, argument_types: tuple[types.Type, ...], entry: str
) -> ir.Module:
    """The C function, which also calls what Numba's calling convention does not name: ``entry``."""
    module = context.create_module("c_wrapper")
    inner = context.declare_function(module, result.fndesc)
    values = [context.get_value_type(type_) for type_ in argument_types]
    outer = ir.Function(module, ir.FunctionType(ir.VoidType(), values), entry)
    builder = ir.IRBuilder(outer.append_basic_block())
    context.call_conv.call_function(
        builder, inner, result.fndesc.restype, argument_types, outer.args
    )
    builder.ret_void()
    return module
