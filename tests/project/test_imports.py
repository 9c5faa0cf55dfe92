"""Imports in fresh processes, and who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import foo_ops

PACKAGE = Path(foo_ops.__file__).parent


def run(program):
    """Run a program in a fresh process; returns what it printed."""
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


def imported_modules(path):
    """All that a file imports, inside its functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_tests_and_benchmarks_import_the_reference():
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "testing" not in path.parents:
            modules = set(imported_modules(path))
            assert "foo_ops.testing.reference" not in modules, path
            assert not any(module.startswith("foo_ops.testing") for module in modules), path


def test_kernels_know_no_tensors():
    for path in (PACKAGE / "kernels").glob("*.py"):
        for module in imported_modules(path):
            top = module.partition(".")[0]
            assert top != "torch", path
            assert top != "foo_ops" or module.startswith("foo_ops.kernels"), path


def test_public_names_are_there():
    for name in foo_ops.__all__:
        assert callable(getattr(foo_ops, name))
