"""Compile a kernel, keep its object code on disk, and hand out its address.

A kernel is compiled at its first use for a signature (see csrc/kernel_table.h; mostly it is one
dtype) and stored as ``<kernel>-<signature>-<hash>.o`` in the folder ``cache_directory()``. The hash
covers the sources of the kernel and of what it builds on, the versions of Numba and LLVM, and the
processor with its features and the width of its vectors.
Loading a stored kernel needs llvmlite but not Numba, whose import alone takes 0.3 s.

Numba's own cache does not serve here: a function made inside a factory misses it in the next
process. What is stored is plain object code that refers to nothing but libc and libm, so that
there is no address of another process in it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable
from typing import Any

from foo_ops.kernels import cache
from foo_ops.kernels.garbage import without_garbage_collection
from foo_ops.kernels.sources import Source
from foo_ops.kernels.upgrades import digest, is_upgraded

with without_garbage_collection():
    import llvmlite
    import llvmlite.binding as llvm

    from foo_ops.kernels.target import (
        has_matrix_unit,
        multiplies_pairs,
        multiplies_tiles,
        target,
        vector_bits,
    )

logger = logging.getLogger("foo_ops")

# The C function in every object file.
ENTRY = "foo_kernel"
# What a kernel may call: these live in the process already. memcpy and memset are LLVM's own idea.
_MATH = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos", "cosh"),
    *("erf", "erfc", "exp", "exp2", "expm1", "floor", "fmod", "hypot", "ldexp", "log", "log10"),
    *("log1p", "log2", "pow", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
ALLOWED_SYMBOLS = {"memcpy", "memset", "memmove", *_MATH, *(f"{name}f" for name in _MATH)}

# What this process runs, whatever is on disk by now.
_SOURCES = digest()
_INSTALLED_NUMBA = importlib.metadata.version("numba")
_NUMBA = getattr(sys.modules.get("numba"), "__version__", _INSTALLED_NUMBA)
# The code lives as long as the engine and the libraries in it: for ever, as callers keep addresses.
_libraries: list[Any] = []


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function to compile: Python source that Numba understands and its argument types.

    The compiled C function takes these arguments and returns nothing. ``vectorizes``: loops over
    scalars are to become loops over vectors, which those over explicit vectors are already.
    """

    function: Callable[..., None]
    argument_types: tuple[Any, ...]
    vectorizes: bool = False


def load(source: Source, signature: str, name: str) -> int:
    """Address of a kernel's C function, compiled if it is not on disk."""
    return _load(_object_code(source, signature), name)


def _object_code(source: Source, signature: str) -> bytes:
    build = functools.partial(source.build, signature)
    if _SOURCES is None:
        _warn_of_upgrade()
        return compile_kernel(build)
    title = f"{source.title}-{signature}"
    name = cache.file_name(title, _key(source, signature, _SOURCES))
    code = cache.read(name)
    if code is None:
        code = compile_kernel(build)
        if is_upgraded() or importlib.metadata.version("numba") != _INSTALLED_NUMBA:
            _warn_of_upgrade()
        else:
            cache.write(name, code)
    return code


@functools.cache
def _warn_of_upgrade() -> None:
    logger.warning(
        "compiled kernels are not kept, since foo_ops or Numba has changed on disk while this "
        "process was running"
    )


def _key(source: Source, signature: str, sources: bytes) -> str:
    """Hash of all that the object code depends on."""
    parts = [
        signature,
        sys.version,
        _NUMBA,
        llvmlite.__version__,
        repr(llvm.llvm_version_info),
        *target(),
        str(vector_bits()),
        str(multiplies_pairs()),
        str(multiplies_tiles()),
        # This also asks for the unit that a stored kernel may use.
        str(has_matrix_unit()),
    ]
    digest = hashlib.sha256("\n".join(parts).encode())
    digest.update(source.fingerprint())
    digest.update(sources)
    return digest.hexdigest()[:16]


def compile_kernel(build: Callable[[], Kernel]) -> bytes:
    """Object code of the kernel that ``build`` makes, with the C function ``ENTRY``."""
    with without_garbage_collection():
        from numba.core.compiler_lock import global_compiler_lock

        from foo_ops.kernels.numba_target import compile_module

        with global_compiler_lock:
            kernel = build()
            module = compile_module(kernel.function, kernel.argument_types, ENTRY)
            return _emit(module, kernel.vectorizes)


def _emit(module: llvm.ModuleRef, vectorizes: bool) -> bytes:
    triple, name, features = target()
    for function in module.functions:
        if not function.is_declaration and function.name != ENTRY:
            function.linkage = "internal"
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=name, features=features, opt=3, reloc="pic", codemodel="jitdefault"
    )
    options = llvm.create_pipeline_tuning_options(speed_level=3 if vectorizes else 1)
    options.loop_vectorization = vectorizes
    # Register tiles are as large as the registers allow: unrolled once more they spill (0.93 and
    # not 0.95 of the FMA peak), and compiling takes longer.
    options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    if vectorizes:
        passes.getModulePassManager().run(module, passes)
    else:
        _simplify(module, passes)
    _check_symbols(module)
    return machine.emit_object(module)


def _simplify(module: llvm.ModuleRef, passes: llvm.PassBuilder) -> None:
    """Inline what is marked so, then simplify each function, once.

    Kernels on explicit vectors have the same inner loops after this as after LLVM's pipelines for
    modules, which simplify each function again wherever it is inlined, and take twice the time.
    """
    inlining = llvm.create_new_module_pass_manager()
    inlining.add_always_inliner_pass()
    inlining.add_global_dead_code_eliminate_pass()
    inlining.run(module, passes)
    simplification = passes.getFunctionPassManager()
    for function in module.functions:
        if not function.is_declaration:
            simplification.run(function, passes)


def _check_symbols(module: llvm.ModuleRef) -> None:
    """Refuse a kernel that calls into Python or Numba's runtime: it could raise or allocate."""
    foreign = {
        function.name
        for function in module.functions
        if function.is_declaration and not function.name.startswith("llvm.")
    } - ALLOWED_SYMBOLS
    if foreign:
        raise TypeError(
            "a kernel must not allocate, raise or call Python, but this one calls "
            + ", ".join(sorted(foreign))
        )


def _load(code: bytes, name: str) -> int:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if not _libraries:
        _libraries.append(llvm.create_lljit_compiler())
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    library = builder.export_symbol(ENTRY).link(_libraries[0], name)
    _libraries.append(library)
    return library[ENTRY]
