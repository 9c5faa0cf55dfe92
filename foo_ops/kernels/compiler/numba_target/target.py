"""A Numba target for kernels, which turns a function and its callees into one LLVM module.

Numba's CPU target compiles each function to machine code, with wrappers for calls from Python, and
links and optimises again for each caller. A kernel only needs the whole, once, at the end: a tenth
of a second for a function, not a fifth.

Functions are written with ``numba.njit``, without options. Constant arguments are typed like any
other number, so that a function is compiled once, not for each constant.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import _dynfunc
from numba.core import cgutils, codegen, compiler, cpu, externals, types
from numba.core.compiler_machinery import PassManager
from numba.core.descriptors import TargetDescriptor
from numba.core.dispatcher import Dispatcher
from numba.core.imputils import builtin_registry
from numba.core.registry import CPUDispatcher
from numba.core.target_extension import (
    CPU,
    dispatcher_registry,
    jit_registry,
    target_override,
    target_registry,
)
from numba.core.typing import builtins as builtins_of_numba  # noqa: F401
from numba.core.typing import mathdecl, templates
from numba.core.typing.context import BaseContext
from numba.cpython import (  # noqa: F401
    builtins,
    iterators,
    mathimpl,
    numbers,
    rangeobj,
    tupleobj,
)

from foo_ops.kernels.compiler.numba_target import registry
from foo_ops.kernels.compiler.numba_target.passes import CallingConvention, pipeline
from foo_ops.kernels.compiler.numba_target.registry import NAME
from foo_ops.kernels.compiler.processor import target

# Functions of at most this many instructions are inlined into all callers.
SMALL = 80


class _Module:
    """The LLVM module of a function, as bitcode.

    Python objects would take fifty times the memory, and be formatted as text again for each kernel
    that calls the function.

    Attributes:
        bitcode: the module's LLVM bitcode.
        sizes: the number of instructions of each function that may be inlined.
        calls: the number of calls of each function.
    """

    def __init__(self, module: ir.Module) -> None:
        text = cgutils.normalize_ir_text(str(module))
        self.bitcode = llvm.parse_assembly(text).as_bitcode()
        self.sizes: dict[str, int] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        for function in module.functions:
            if function.is_declaration:
                continue
            steps = [step for block in function.blocks for step in block.instructions]
            self.calls.update(it.callee.name for it in steps if isinstance(it, ir.CallInstr))
            if "noinline" not in function.attributes:
                self.sizes[function.name] = len(steps)


class _Library(codegen.CodeLibrary):
    """The LLVM modules of a function, and the libraries of the functions that it calls."""

    def __init__(self, codegen: codegen.Codegen, name: str) -> None:
        super().__init__(codegen, name)
        self._modules: list[_Module] = []
        self._called: list[_Library] = []

    def add_ir_module(self, ir_module: ir.Module) -> None:
        self._modules.append(_Module(ir_module))

    def add_linking_library(self, library: _Library) -> None:
        self._called.append(library)

    def finalize(self) -> None:
        self._finalized = True

    def get_function(self, name: str) -> ir.Function:
        raise NotImplementedError("a function of a kernel is called by its name")

    def get_llvm_str(self) -> str:
        return "\n".join(str(llvm.parse_bitcode(it.bitcode)) for it in self._modules)

    def get_asm_str(self) -> str:
        raise NotImplementedError("a function of a kernel is assembled with the whole kernel")

    def modules(self) -> Iterator[_Module]:
        """Yield the modules of this function and of all its callees, each once."""
        seen, waiting = {self}, [self]
        while waiting:
            library = waiting.pop()
            yield from library._modules
            called = dict.fromkeys(other for other in library._called if other not in seen)
            seen.update(called)
            waiting += called


class _Codegen(codegen.Codegen):
    """Makes modules for the processor that kernels are compiled for."""

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
    """A context that refreshes only if something was registered.

    Numba would refresh 1200 times for a kernel.
    """

    _registries: Mapping[Any, Any]
    _known = -1

    def refresh(self) -> None:
        count = self._registrations()
        if self._known != count:
            super().refresh()  # type: ignore[misc]
            # The count from before refresh: registrations by its own imports may need another one.
            self._known = count

    def _registrations(self) -> int:
        """Count the functions, attributes and the like in the registries of this context."""
        return sum(
            len(getattr(registry, item))
            for registry, loader in self._registries.items()
            for item in loader.registry_items
        )


class _TypingContext(_RefreshedIfNew, BaseContext):
    """A context that caches signatures and types: nine of ten lookups of a kernel repeat."""

    def init(self) -> None:
        self._signatures: dict[Any, Any] = {}
        # By id, with the value, which keeps it alive so that no other value gets the id.
        self._types: dict[int, tuple[Any, types.Type]] = {}

    def _load_builtins(self) -> None:
        """Load the modules imported here, not arrays, sets and dictionaries, which take 0.4 s."""
        self._signatures.clear()
        self._types.clear()
        self.install_registry(templates.builtin_registry)

    def load_additional_registries(self) -> None:
        self.install_registry(mathdecl.registry)
        self.install_registry(registry.signatures)

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        # Not cached: a jitted function may not be compiled yet.
        if not isinstance(func, types.Function):
            return super().resolve_function_type(func, args, kws)
        key = func, tuple(args), tuple(sorted(dict(kws).items()))
        found = self._signatures.get(key)
        if found is None:
            found = self._signatures[key] = super().resolve_function_type(func, args, kws)
        return found

    def resolve_value_type(self, value: Any) -> types.Type:
        if not callable(value):
            return super().resolve_value_type(value)
        if id(value) not in self._types:
            self._types[id(value)] = value, self._type_of_function(value)
        return self._types[id(value)][1]

    def _type_of_function(self, value: Any) -> types.Type:
        if isinstance(value, CPUDispatcher):
            value = _dispatcher_of(value)
        # Numba would first check whether range is one of its own lists, and import those.
        known = self._lookup_global(value) if isinstance(value, type) else None
        return super().resolve_value_type(value) if known is None else known


class _Context(_RefreshedIfNew, cpu.CPUContext):
    vectorizes = False

    def init(self) -> None:
        self.is32bit = False
        self._internal_codegen = _Codegen()
        externals.c_math_functions.install(self)

    def load_additional_registries(self) -> None:
        self.install_registry(mathimpl.registry)
        # A later registry overrides an earlier one.
        self.install_registry(builtin_registry)
        self.install_registry(registry.registry)
        self.install_registry(registry.functions)

    def pair_first(self, builder: ir.IRBuilder, value: ir.Value, type_: types.Pair) -> ir.Value:
        return registry.part_of(builder, value, 0)

    def pair_second(self, builder: ir.IRBuilder, value: ir.Value, type_: types.Pair) -> ir.Value:
        return registry.part_of(builder, value, 1)

    @property
    def call_conv(self) -> CallingConvention:
        return CallingConvention(self)

    def post_lowering(self, module: ir.Module, library: _Library) -> None:
        """Do nothing: leaves out Numba's runtime, which counts references."""

    def create_cpython_wrapper(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a kernel's function is not called from Python."""

    def create_cfunc_wrapper(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: only the kernel as a whole gets a C wrapper."""

    def get_executable(self, library: _Library, fndesc: Any, env: Any) -> Any:
        """Return an object that identifies the function. There is no machine code to call yet."""
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
    """Inherits everything that is registered for all CPUs."""


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


class _Compiler(compiler.CompilerBase):
    def define_pipelines(self) -> list[PassManager]:
        return [pipeline(NAME)]


def compile_module(
    function: Callable[..., None],
    argument_types: tuple[types.Type, ...],
    entry: str,
    *,
    vectorizes: bool,
) -> llvm.ModuleRef:
    """Make the LLVM module of a function, with a C function ``entry`` that calls it.

    If LLVM ``vectorizes`` its loops, vector versions of functions are emitted, too. The caller must
    hold Numba's global compiler lock.
    """
    flags = compiler.Flags()
    # Division by zero gives infinity or NaN, as in NumPy, since a kernel cannot raise.
    flags.error_model = "numpy"
    context = _descriptor.target_context
    context.vectorizes = vectorizes
    # Without the override, Numba would also load its own target, with all array support.
    with target_override(NAME):
        result = compiler.compile_extra(
            _descriptor.typing_context, context, function, argument_types, types.void, flags, {},
            pipeline_class=_Compiler,
        )  # fmt: skip
    modules = [_Module(_c_wrapper(context, result, argument_types, entry))]
    modules += result.library.modules()
    whole, *others = (llvm.parse_bitcode(module.bitcode) for module in modules)
    for other in others:
        whole.link_in(other)
    _mark_inlined(whole, modules)
    whole.verify()
    return whole


def _mark_inlined(whole: llvm.ModuleRef, modules: list[_Module]) -> None:
    """Mark functions for inlining that are called from one place or are small."""
    calls: collections.Counter[str] = sum((it.calls for it in modules), collections.Counter())
    for name, size in itertools.chain.from_iterable(it.sizes.items() for it in modules):
        if calls[name] == 1 or size <= SMALL:
            whole.get_function(name).add_function_attribute("alwaysinline")


def _c_wrapper(
    context: _Context, result: Any, argument_types: tuple[types.Type, ...], entry: str
) -> ir.Module:
    """Make the C function ``entry``, which calls the compiled function."""
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
