"""Checks a wheel: what is in it, and that it works in a clean environment without a compiler.

``python release/check_wheel.py build/dist/foo_ops-*.whl``. There the quick starts of the README
run, which compile kernels, and the tests of the device; those that need a compiler, since
`torch.compile` makes C++ of them, say that they are skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang")
# Packages of their own, as setup.py says.
ENTRY_POINTS = {
    "foo_ops/testing/pytest_plugin/": "pytest_foo_ops/",
    "foo_ops/_entry_point/": "torch_foo_ops/",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    check_contents(zipfile.ZipFile(wheel).namelist())
    with tempfile.TemporaryDirectory() as folder:
        check_use(wheel, Path(folder))
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MB")


def check_contents(names: Iterable[str]) -> None:
    """Refuse a wheel that lacks a module of the tree, or has anything else."""
    installed = {name for name in names if not re.match(r"foo_ops-[^/]*\.dist-info/", name)}
    companions = {name for name in installed if re.fullmatch(r"foo_ops/_C\.[^/]*\.so", name)}
    expected = {"foo_ops/py.typed", *modules()}
    missing = [*sorted(expected - installed), *([] if companions else ["foo_ops/_C"])]
    foreign = sorted(installed - expected - companions)
    if missing:
        sys.exit(f"the wheel lacks {', '.join(missing)}")
    if foreign:
        sys.exit(f"the wheel has what is not to be installed: {', '.join(foreign)}")


def modules() -> set[str]:
    """Return the modules of the tree, by the names that they are installed under."""
    found = set()
    for path in (REPOSITORY / "foo_ops").rglob("*.py"):
        name = path.relative_to(REPOSITORY).as_posix()
        for folder, package in ENTRY_POINTS.items():
            name = name.replace(folder, package)
        found.add(name)
    return found


def check_use(wheel: Path, folder: Path) -> None:
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    tools = ["pytest", "pytest-xdist", "hypothesis", "expecttest"]
    constraints = ["--constraint", str(REPOSITORY / "constraints.txt")]
    pip = [python, "-m", "pip", "--quiet", "install", *constraints, str(wheel), *tools]
    subprocess.run(pip, check=True)
    variables = {
        "PATH": str(environment / "bin"),
        "HOME": str(folder),
        "FOO_CACHE_DIR": str(folder / "kernels"),
        "OMP_WAIT_POLICY": "passive",
    }
    assert not any(shutil.which(compiler, path=variables["PATH"]) for compiler in COMPILERS)

    def run(*arguments: str, **more: str) -> None:
        subprocess.run([python, *arguments], check=True, cwd=folder, env=variables | more)

    for program in quick_starts():
        # One of them compiles a graph.
        run("-c", program, TORCH_COMPILE_DISABLE="1")
    run("-m", "foo_ops.compile", "abs", "--dtypes", "float32")
    kernels = list((folder / "kernels").glob("*.o"))
    assert kernels, "no kernel was kept"
    shutil.copytree(REPOSITORY / "tests", folder / "tests")
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = tests\n")
    workers = str(min(4, os.cpu_count() or 1))
    options = ["-q", "--import-mode=importlib", "-n", workers]
    run("-m", "pytest", *options, "tests/device")


def quick_starts() -> list[str]:
    """Return the programs of the README, but for those that need another package."""
    text = (REPOSITORY / "README.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [program for program in programs if "transformers" not in program]


if __name__ == "__main__":
    main()
