"""The package is imported in fresh processes, in any order, without its compiler."""

import subprocess
import sys

import pytest

import foo_ops


def run(program):
    """Run a program in a fresh process, and return what it printed."""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "foo_ops, torch",
        "torch, foo_ops",
        "foo_ops.ops.abs, torch",
        "foo_ops.testing, torch",
        "foo_ops.kernels.compiler.load, torch",
        "numba, foo_ops, torch",
    ],
)
def test_operators_are_there_after(imports):
    program = f"import {imports}; print(torch.ops.foo.abs(torch.tensor(-2)).item())"
    assert run(program) == "2"


@pytest.mark.parametrize("imports", ["torch", "foo_ops", "foo_ops.info"])
def test_compiler_is_not_imported_by(imports):
    program = f"import {imports}, sys; print('numba' in sys.modules, 'llvmlite' in sys.modules)"
    assert run(program) == "False False"


def test_public_names_are_there():
    for name in foo_ops.__all__:
        assert callable(getattr(foo_ops, name))
