"""Emit the object code of a kernel: Numba compiles it to LLVM IR, and LLVM to machine code."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foo_ops.kernels.compiler.kernel import Kernel

# ------------------------------------------------------------------------------- garbage collection

# Stops Python's garbage collector during work that makes many objects at once.


_lock = threading.Lock()
# The number of threads doing such work, and the thresholds from before the first of them.
_workers = 0
_thresholds = gc.get_threshold()


@contextlib.contextmanager
def without_garbage_collection(*, leaves_garbage: bool = False) -> Iterator[None]:
    """Stop the collector, which takes a fifth of a compiler's time, and 0.1 s beside torch.

    It would find nothing: all that a compiler makes is in use until it is done. Python has one
    collector for all threads, and no other way to spare one of them. A threshold of 0 stops it, not
    `gc.disable`, which others may call in another thread meanwhile.

    Args:
        leaves_garbage: most of the new objects are garbage in the end, as in compilation, and are
            collected at once: 0.5 MB of a kernel instead of 2 MB stay until the next collection of
            all objects. The objects of an import stay alive.
    """
    _begin()
    try:
        yield
    finally:
        _end(leaves_garbage)


def _begin() -> None:
    global _workers, _thresholds
    with _lock:
        _workers += 1
        if _workers == 1:
            _thresholds = gc.get_threshold()
            gc.set_threshold(0, *_thresholds[1:])


def _end(leaves_garbage: bool) -> None:
    global _workers
    with _lock:
        _workers -= 1
        is_last = _workers == 0
        # Unless somebody else has set other thresholds meanwhile.
        if is_last and gc.get_threshold()[0] == 0:
            gc.set_threshold(*_thresholds)
        if not leaves_garbage:
            _count_as_old()
    if leaves_garbage and is_last and gc.isenabled():
        # The youngest generation is the objects made meanwhile.
        gc.collect(0)


def _count_as_old() -> None:
    """Move all objects into the oldest generation without visiting them.

    Otherwise the next collection of the youngest generation visits all objects made meanwhile.
    Objects that somebody else has frozen stay frozen.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


# -------------------------------------------------------------------------------------- object code


with without_garbage_collection():
    import llvmlite.binding as llvm

    from foo_ops.kernels.compiler.processor import target

LLVM_OPTIONS = {
    # A branch on an option, such as the form of gelu, is moved out of a loop of up to 150
    # instructions. A vectorised loop with the branch would compute both sides for each element: 1.3
    # times as long for the gradient of gelu.
    "unswitch-threshold": (150, 50),
    # Loops of up to half this cost compute two vectors at a time: gelu of bfloat16 and float16,
    # otherwise a single chain of 40 dependent instructions, takes 0.82 of the time.
    "small-loop-cost": (40, 20),
}
"""Our value and LLVM's default for each option."""

# The C function in every object file.
ENTRY = "foo_kernel"
# Numba numbers the functions of a process. Without the numbers, every process emits equal bytes.
_NUMBER = re.compile(r"B\d+v\d+")
# A kernel may call these functions, which are in the process already. LLVM inserts memcpy and
# memset itself.
_MATH = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos", "cosh"),
    *("erf", "erfc", "exp", "exp2", "expm1", "floor", "fmod", "hypot", "ldexp", "log", "log10"),
    *("log1p", "log2", "pow", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
ALLOWED_SYMBOLS = {"memcpy", "memset", "memmove", *_MATH, *(f"{name}f" for name in _MATH)}


def compile_kernel(build: Callable[[], Kernel]) -> bytes:
    """Return the object code of the kernel that ``build`` makes, with the C function ``ENTRY``."""
    with without_garbage_collection(leaves_garbage=True):
        from numba.core.compiler_lock import global_compiler_lock

        from foo_ops.kernels.compiler.numba_target.target import compile_module

        with global_compiler_lock:
            kernel = build()
            module = compile_module(
                kernel.function, kernel.argument_types, ENTRY, vectorizes=kernel.vectorizes
            )
            return _emit(module, kernel.vectorizes)


def _emit(module: llvm.ModuleRef, vectorizes: bool) -> bytes:
    triple, name, features = target()
    for function in module.functions:
        # Weak functions are kept for loops that LLVM vectorises: see
        # foo_ops/kernels/math/formula.py.
        is_for_loops = vectorizes and function.linkage == llvm.Linkage.weak_odr
        is_kept = function.name == ENTRY or is_for_loops
        if not function.is_declaration and not is_kept:
            function.linkage = "internal"
            function.name = _NUMBER.sub("", function.name)
    # cache.py links the sections of an object next to each other. "jitdefault" would need one more
    # instruction for each constant in memory (gelu 1.15 times as long).
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=name, features=features, opt=3, reloc="pic", codemodel="small"
    )
    options = llvm.create_pipeline_tuning_options(speed_level=3 if vectorizes else 1)
    options.loop_vectorization = vectorizes
    # Register tiles fill the registers: unrolled further they spill (0.93 instead of 0.95 of the
    # FMA peak), and compiling takes longer.
    options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    with _our_options():
        if vectorizes:
            passes.getModulePassManager().run(module, passes)
            whole = [it for it in module.functions if it.linkage == llvm.Linkage.weak_odr]
            if whole:
                # Vectorised loops call the vector functions by now.
                for function in whole:
                    function.linkage = "internal"
                _simplify(module, passes)
        else:
            _simplify(module, passes)
    _check_symbols(module)
    return machine.emit_object(module)


@contextmanager
def _our_options() -> Iterator[None]:
    """Set LLVM options, which only exist for the whole process.

    Numba's lock is held, so that functions that a user compiles do not see them.
    """
    for name, (ours, _) in LLVM_OPTIONS.items():
        llvm.set_option("", f"-{name}={ours}")
    try:
        yield
    finally:
        for name, (_, before) in LLVM_OPTIONS.items():
            llvm.set_option("", f"-{name}={before}")


def _simplify(module: llvm.ModuleRef, passes: llvm.PassBuilder) -> None:
    """Inline the functions marked for it, then simplify each function once.

    For kernels on explicit vectors this gives the same inner loops as LLVM's module pipelines,
    which simplify a function again wherever it is inlined, and take twice the time.
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
