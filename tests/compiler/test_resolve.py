"""A kernel also compiles where its compiler could wait for code that waits for the kernel."""

from support.processes import run

OPERATOR = """
import torch
from foo_ops import library

def define(name, kernel):
    library.define(name, "(Tensor x) -> Tensor")
    library.register_kernel(name, "cpu", library.elementwise_kernel(dtypes=[torch.float32])(kernel))

x = torch.tensor([-1.5, 2.0])
"""


def test_kernel_that_needs_another_while_it_is_compiled(tmp_path):
    program = f"""{OPERATOR}
from numba import types
from numba.extending import intrinsic

@intrinsic
def constant(typing_context):
    value = torch.ops.foo.abs(x)[0].item()
    def code(context, builder, signature, arguments):
        return context.get_constant(types.float32, value)
    return types.float32(), code

def f(x):
    return x * constant()

define("foo_resolve::f", f)
print(torch.ops.foo_resolve.f(x).tolist())
"""
    assert run(program, tmp_path) == ("[-2.25, 3.0]", "")


def test_kernel_that_imports_a_module_whose_import_needs_it(tmp_path):
    """A module may use its own operators while it is imported."""
    (tmp_path / "using.py").write_text(f"""{OPERATOR}
from numba import types
from numba.extending import intrinsic

@intrinsic
def constant(typing_context):
    from using import VALUE
    def code(context, builder, signature, arguments):
        return context.get_constant(types.float32, VALUE)
    return types.float32(), code

def f(x):
    return x * constant()

VALUE = 2.0
define("foo_resolve::f", f)
print(torch.ops.foo_resolve.f(x).tolist())
""")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import using"
    assert run(program, tmp_path / "cache") == ("[-3.0, 4.0]", "")


def test_kernel_that_is_needed_while_numba_compiles(tmp_path):
    program = f"""{OPERATOR}
from numba.core.compiler_lock import global_compiler_lock

with global_compiler_lock:
    print(torch.ops.foo.abs(x).tolist())
"""
    assert run(program, tmp_path) == ("[1.5, 2.0]", "")


def test_no_more_threads(tmp_path):
    program = f"""{OPERATOR}
import threading

def start(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = start
print(torch.ops.foo.abs(x).tolist())
"""
    assert run(program, tmp_path) == ("[1.5, 2.0]", "")


def test_kernel_at_exit(tmp_path):
    program = f"""{OPERATOR}
import atexit

atexit.register(lambda: print(torch.ops.foo.abs(x).tolist()))
"""
    assert run(program, tmp_path) == ("[1.5, 2.0]", "")
