"""A build is for one torch and reports it; users' mypy finds the annotations."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.extras import missing_package
from support.processes import python

import foo_ops._built_for
from foo_ops._autoload import check_torch

ENTRY = Path(foo_ops.__file__).parent / "_entry_point" / "__init__.py"
INSTALLED = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture
def built_for_another(monkeypatch):
    monkeypatch.setattr(foo_ops._built_for, "TORCH", "2.1")
    return (
        f"foo_ops was built for torch 2.1, but torch {torch.__version__} is installed: "
        f"install torch 2.1, or a foo_ops for torch {INSTALLED}"
    )


def test_built_for_the_torch_that_is_installed():
    assert foo_ops._built_for.TORCH == INSTALLED
    check_torch()


def test_another_torch(built_for_another):
    with pytest.raises(ImportError) as caught:
        check_torch()
    assert str(caught.value) == built_for_another


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (
            'sys.modules["foo_ops._built_for"] = types.SimpleNamespace(TORCH="2.1")',
            f"foo_ops was built for torch 2.1, but torch {torch.__version__} is installed: "
            f"install torch 2.1, or a foo_ops for torch {INSTALLED}",
        ),
        (
            'import torch; torch.utils.rename_privateuse1_backend("npu")',
            "torch has room for one out-of-tree backend (PrivateUse1), and npu already uses it",
        ),
    ],
)
def test_import_of_torch_goes_on_without_foo(setup, reason):
    """The extension is not loaded; `import foo_ops` later raises the reason."""
    program = f"""
import importlib.util, sys, types, warnings
{setup}
with warnings.catch_warnings(record=True) as caught:
    import torch
    spec = importlib.util.spec_from_file_location("entry", sys.argv[1])
    entry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(entry)
    entry.autoload()
print(len(caught), caught[0].message)
print(torch.ones(2).sum().item(), hasattr(torch, "foo"), "foo_ops._C" in sys.modules)
try:
    import foo_ops
except ImportError as error:
    print(error)
"""
    process = python(program, ENTRY, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        f"1 device foo is not available: {reason}",
        "2.0 False False",
        reason,
    ]


@pytest.mark.whole
def test_annotations_in_a_program_of_a_user(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nimport foo_ops\n"
        "reveal_type(foo_ops.silu_mul(torch.ones(3), torch.ones(3)))\n"
        "foo_ops.silu_mul('text', torch.ones(3))\n"
    )
    # A new interpreter: mypy needs no torch.
    process = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", tmp_path, program],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(Path(foo_ops.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    # mypy does not follow an editable installation's hook; a wheel's has py.typed.
    assert (Path(foo_ops.__file__).parent / "py.typed").exists()
    assert 'Revealed type is "torch._tensor.Tensor"' in process.stdout
    assert 'Argument 1 to "silu_mul" has incompatible type "str"' in process.stdout
    assert process.stdout.count("error:") == 1


@pytest.mark.parametrize(
    ("imported", "package"),
    [
        ("transformers", "transformers"),
        ("torch.no_such_module", None),
        ("foo_ops.no_such_name", None),
    ],
)
def test_module_of_tests_that_misses_a_package(monkeypatch, imported, package):
    """Tests are skipped only for packages that `make setup` leaves out."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(imported)
    reported = ImportError("as our integrations and pytest report it")
    reported.__cause__ = caught.value
    assert missing_package(reported) == package
