"""The package is imported in fresh processes, in any order, without its compiler."""

import json
from pathlib import Path

import pytest
from support.parts import whole
from support.processes import python

import foo_ops

REPOSITORY = Path(__file__).parents[2]
FIRST_USES = REPOSITORY / "tests/support/first_uses.py"
FIRST_USES_OF_DEVICE = REPOSITORY / "tests/support/first_uses_of_device.py"
# The device, and the modules that declare the operators.
BY_AUTOLOAD = {
    *("foo_ops", "foo_ops._autoload", "foo_ops._built_for"),
    *("foo_ops._C", "foo_ops._C.device", "foo_ops._C.sanitizer", "foo_ops._process"),
    *("foo_ops._operators", "foo_ops._schemas", "foo_ops.compat"),
    "foo_ops.flash_attention_of_cpu",
}


def run(program, *arguments, **options):
    """Run a program in a fresh process, and return its output."""
    process = python(program, *arguments, **options)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "foo_ops, torch",
        "torch, foo_ops",
        *whole(
            "foo_ops.ops.abs, torch",
            "foo_ops.testing, torch",
            "foo_ops.kernels.compiler.cache, torch",
            "numba, foo_ops, torch",
        ),
    ],
)
def test_operators_are_there_after(imports):
    program = f"import {imports}; print(torch.ops.foo.abs(torch.tensor(-2)).item())"
    # A fork has imported torch already.
    assert run(program, new=not imports.startswith("torch")) == "2"


@pytest.mark.parametrize("imports", ["torch", "foo_ops", "foo_ops.info"])
def test_compiler_is_not_imported_by(imports):
    program = f"import {imports}, sys; print('numba' in sys.modules, 'llvmlite' in sys.modules)"
    assert run(program) == "False False"


def test_public_names_are_there():
    assert foo_ops.__all__ == foo_ops.ops.__all__
    for name in foo_ops.__all__:
        assert callable(getattr(foo_ops, name))
    assert {*foo_ops.__all__, "library", "language", "device"} <= set(dir(foo_ops))
    with pytest.raises(AttributeError, match=r"\Amodule 'foo_ops' has no attribute 'no_such'\Z"):
        foo_ops.no_such  # noqa: B018


def test_modules_that_are_loaded():
    """Each step needs a fresh process."""
    program = """
import json, sys
import torch
steps, loaded = [], set(sys.modules)
for step in ("import foo_ops", "foo_ops.library", "foo_ops.language", "foo_ops.attention"):
    exec(step)
    steps.append(sorted(set(sys.modules) - loaded))
    loaded = set(sys.modules)
print(json.dumps(steps))
"""
    autoload, library, language, operators = map(
        set, json.loads(run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    )
    device = {name for name in autoload if name.startswith("foo_ops.device")}
    assert autoload == BY_AUTOLOAD | device | {"torch.foo"}
    assert {name.split(".")[1] for name in library} == {"kernels", "library"}
    assert language == {"foo_ops.language"}
    others = {name for name in operators if not name.startswith("foo_ops.")}
    assert others == set()
    assert "foo_ops.ops.attention.dense" in operators


def test_start_of_torch_loads_as_much_as_import_of_foo_ops():
    names = [
        # A fork has imported torch already.
        run(f"import sys, {it}; print(sorted(n for n in sys.modules if 'foo' in n))", new=True)
        for it in ("torch", "foo_ops")
    ]
    assert names[0] == names[1].replace("'foo_ops.', ", "")


@pytest.mark.whole
def test_first_uses_of_operators(tmp_path):
    """In a process that has not used an operator."""
    run(FIRST_USES, tmp_path)
    assert run(FIRST_USES, tmp_path, "run") == "[]"


def test_first_uses_of_the_device():
    """In a process that has not used the device."""
    assert run(FIRST_USES_OF_DEVICE) == "[]"


def test_schemas_are_those_of_the_operators(monkeypatch):
    """If this fails, run release/write_schemas.py."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "release"))
    import write_schemas

    assert write_schemas.PATH.read_text() == write_schemas.text()
