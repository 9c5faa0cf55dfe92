"""Checks a source distribution: without torch its build says in one line what is missing.

``python release/check_sdist.py build/dist/foo_ops-*.tar.gz``. With torch it builds the wheel that
`make wheel` checks: what the extension is compiled from is compared with the tree.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
MISSING = (
    "foo_ops is built for the torch that is installed, and there is none: "
    "pip install torch setuptools ninja, then pip install --no-build-isolation foo_ops"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdist", type=Path)
    sdist = parser.parse_args().sdist.resolve()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (tree,) = Path(folder).iterdir()
        check_files(tree)
        check_without_torch(tree)
    print(f"{sdist.name}: {sdist.stat().st_size / 2**20:.1f} MB")


def check_files(tree: Path) -> None:
    for path in (REPOSITORY / "foo_ops").rglob("*"):
        if path.suffix in (".py", ".cpp", ".h") and path.name != "_built_for.py":
            name = path.relative_to(REPOSITORY)
            assert (tree / name).read_bytes() == path.read_bytes(), name


def check_without_torch(tree: Path) -> None:
    program = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
from setuptools.build_meta import get_requires_for_build_wheel
get_requires_for_build_wheel()
"""
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.strip() == MISSING, process.stderr


if __name__ == "__main__":
    main()
