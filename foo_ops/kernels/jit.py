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
import importlib
import importlib.metadata
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foo_ops.kernels.garbage import without_garbage_collection
from foo_ops.kernels.sources import SOURCES, Source

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
CHECKSUM_SIZE = hashlib.sha256().digest_size
# What a kernel may call: these live in the process already. memcpy and memset are LLVM's own idea.
_MATH = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos", "cosh"),
    *("erf", "erfc", "exp", "exp2", "expm1", "floor", "fmod", "hypot", "ldexp", "log", "log10"),
    *("log1p", "log2", "pow", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
ALLOWED_SYMBOLS = {"memcpy", "memset", "memmove", *_MATH, *(f"{name}f" for name in _MATH)}

_lock = threading.Lock()
_addresses: dict[tuple[str, str], int] = {}
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


class _Module(Source):
    """A module of ``foo_ops.kernels``. The key covers the sources of all of them."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    @property
    def title(self) -> str:
        return self._kernel

    def fingerprint(self) -> bytes:
        return self._kernel.encode()

    def build(self, signature: str) -> Kernel:
        name, _, variant = self._kernel.partition(".")
        options = {variant: True} if variant else {}
        module = importlib.import_module(f"foo_ops.kernels.{name}")
        kernel: Kernel = module.build(signature, **options)
        return kernel

    def explain(self, signature: str, error: Exception) -> None:
        """The package's own kernels compile; whoever writes one wants to see all of it."""


def resolve(kernel: str, signature: str) -> int:
    """Address of the C function for ``kernel``, compiled or loaded at the first call.

    Without an entry in `SOURCES` ``foo_ops.kernels.<kernel>`` must have a function
    ``build(dtype) -> Kernel``. ``<kernel>.plain`` stands for ``build(dtype, plain=True)``: the
    kernel without its options, which is compiled in half the time. Thread-safe.
    """
    with _lock:
        address = _addresses.get((kernel, signature))
        if address is None:
            source = SOURCES.get(kernel) or _Module(kernel)
            try:
                address = _load(_object_code(source, signature), f"{kernel}-{signature}")
            except Exception as error:
                explained = source.explain(signature, error)
                if explained is None:
                    raise
                raise explained from error
            _addresses[kernel, signature] = address
        return address


def cache_directory() -> Path:
    """Folder of the compiled kernels: FOO_CACHE_DIR, or foo_ops in the user's cache folder."""
    chosen = os.environ.get("FOO_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "foo_ops"


def _object_code(source: Source, signature: str) -> bytes:
    path = cache_directory() / f"{source.title}-{signature}-{_key(source, signature)}.o"
    code = _read(path)
    if code is None:
        code = compile_kernel(functools.partial(source.build, signature))
        _write(path, code)
    return code


def _key(source: Source, signature: str) -> str:
    """Hash of all that the object code depends on."""
    parts = [
        signature,
        sys.version,
        importlib.metadata.version("numba"),
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
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> bytes | None:
    """The object code in a cache file, or None if there is none or it is not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, code = content[:CHECKSUM_SIZE], content[CHECKSUM_SIZE:]
    if hashlib.sha256(code).digest() != checksum:
        logger.warning("the cached kernel %s is broken and is compiled again", path)
        return None
    return code


def _write(path: Path, code: bytes) -> None:
    """Store object code so that another process sees all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        logger.warning("compiled kernels are not kept, since %s cannot be written: %s", path, error)


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
