"""The checks of `make wheel` and `make sdist` refuse wrong files."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import foo_ops

REPOSITORY = Path(__file__).parents[2]
COMPANION = "foo_ops/_C.cpython-311-x86_64-linux-gnu.so"


@pytest.fixture
def check_wheel(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "release"))
    import check_wheel

    return check_wheel


@pytest.fixture
def check_sdist(check_wheel):
    import check_sdist

    return check_sdist


@pytest.fixture
def names(check_wheel):
    """Return the names that a wheel must have."""
    metadata = f"foo_ops-{foo_ops.__version__}+torch2.13.dist-info/METADATA"
    return {*check_wheel.modules(), "foo_ops/py.typed", COMPANION, metadata}


def test_wheel(check_wheel, names):
    assert {"torch_foo_ops/__init__.py", "pytest_foo_ops/__init__.py"} < names
    assert {"foo_ops/__init__.py", "foo_ops/_built_for.py", "foo_ops/ops/abs.py"} < names
    check_wheel.check_contents(names)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("foo_ops/py.typed", "foo_ops/py.typed"),
        ("foo_ops/_built_for.py", "foo_ops/_built_for.py"),
        ("foo_ops/ops/abs.py", "foo_ops/ops/abs.py"),
        ("torch_foo_ops/__init__.py", "torch_foo_ops/__init__.py"),
        (COMPANION, "foo_ops/_C"),
    ],
)
def test_wheel_that_lacks_a_file(check_wheel, names, missing, named):
    with pytest.raises(SystemExit, match=f"^the wheel lacks {re.escape(named)}$"):
        check_wheel.check_contents(names - {missing})


@pytest.mark.parametrize(
    "foreign",
    [
        "tests/conftest.py",
        "release/copy_tree.py",
        "foo_ops/csrc/bindings/module.cpp",
        "foo_ops/_C.so.orig",
    ],
)
def test_wheel_that_has_more(check_wheel, names, foreign):
    message = f"^the wheel has what is not to be installed: {re.escape(foreign)}$"
    with pytest.raises(SystemExit, match=message):
        check_wheel.check_contents(names | {foreign})


@pytest.fixture
def tree(tmp_path):
    """Unpack a correct source distribution."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    left_out = shutil.ignore_patterns("*.so", "_built_for.py", "__pycache__")
    shutil.copytree(REPOSITORY / "foo_ops", tmp_path / "foo_ops", ignore=left_out)
    return tmp_path


def test_source_distribution(check_sdist, tree):
    check_sdist.check_files(tree)
    check_sdist.check_without_torch(tree)


@pytest.mark.parametrize(
    "name", ["py.typed", "csrc/bindings/module.cpp", "csrc/bindings/bindings.h", "ops/abs.py"]
)
def test_source_distribution_that_lacks_a_file(check_sdist, tree, name):
    (tree / "foo_ops" / name).unlink()
    message = f"^the source distribution differs from the tree in {re.escape(name)}$"
    with pytest.raises(SystemExit, match=message):
        check_sdist.check_files(tree)


@pytest.mark.parametrize("change", ["", "# changed"])
def test_source_distribution_of_another_tree(check_sdist, tree, change):
    (tree / "foo_ops" / "new.py").write_text(change)
    with pytest.raises(SystemExit, match=r" differs from the tree in new\.py$"):
        check_sdist.check_files(tree)


def test_build_that_does_not_ask_for_torch(check_sdist, tree):
    (tree / "setup.py").write_text("import setuptools\nsetuptools.setup()\n")
    with pytest.raises(AssertionError):
        check_sdist.check_without_torch(tree)


def build_step(tree, **environment):
    """Run the first step of pip's build in a new interpreter, since it imports torch itself."""
    program = "from setuptools import build_meta; build_meta.get_requires_for_build_wheel()"
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=tree,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_nothing_beside_the_sources_says_that_they_are_installed(tree):
    """No metadata lies beside the sources.

    If it did, with the folder on PYTHONPATH and without the packages of the entry points, `import
    torch` and pytest would fail.
    """
    process = build_step(tree)
    assert process.returncode == 0, process.stderr
    assert not list(tree.glob("*.egg-info"))
    assert (tree / "build" / "foo_ops.egg-info" / "entry_points.txt").exists()


def test_torch_that_is_too_old(tree, tmp_path):
    """This torch is an empty package with an old version."""
    torch = tmp_path / "old" / "torch"
    (torch / "utils").mkdir(parents=True)
    (torch / "__init__.py").write_text('__version__ = "2.12.1+cpu"\n')
    (torch / "utils" / "cpp_extension.py").write_text("BuildExtension = CppExtension = object\n")
    process = build_step(tree, PYTHONPATH=str(torch.parent))
    assert process.returncode == 1
    assert process.stderr == "foo_ops works with torch 2.13 to 2.15, got 2.12.1+cpu\n"
