"""Checks a wheel: what is in it, and that it works in a clean environment without a compiler.

``python release/check_wheel.py build/dist/foo_ops-*.whl``. There the quick starts of the README
run, which compile kernels, and the tests of the device. `torch.compile` needs a compiler of its
own, and is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang")
NEEDED = {"foo_ops/py.typed", "foo_ops/_built_for.py", "torch_foo_ops/__init__.py"}
NEEDS_A_COMPILER = ("*compile*.py", "test_cpp_wrapper.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        check_use(wheel, Path(folder))
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MB")


def check_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= NEEDED, NEEDED - names
    assert any(re.match(r"foo_ops/_C\..*\.so$", name) for name in names)
    foreign = [
        name for name in names if re.match(r"(tests|release|benchmarks|examples|build)/", name)
    ]
    foreign += [name for name in names if name.endswith((".cpp", ".h"))]
    assert not foreign, foreign


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
        "TORCH_COMPILE_DISABLE": "1",
    }
    assert not any(shutil.which(compiler, path=variables["PATH"]) for compiler in COMPILERS)

    def run(*arguments: str) -> None:
        subprocess.run([python, *arguments], check=True, cwd=folder, env=variables)

    for program in quick_starts():
        run("-c", program)
    assert list((folder / "kernels").glob("*.o"))
    run("-m", "foo_ops.compile", "abs", "--dtypes", "float32")
    shutil.copytree(REPOSITORY / "tests", folder / "tests")
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = tests\n")
    left_out = [f"--ignore-glob={pattern}" for pattern in NEEDS_A_COMPILER]
    workers = str(min(4, os.cpu_count() or 1))
    options = ["-q", "--import-mode=importlib", "-n", workers, *left_out]
    run("-m", "pytest", *options, "tests/device")


def quick_starts() -> list[str]:
    """Return the programs of the README."""
    return re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.M | re.S)


if __name__ == "__main__":
    main()
