"""Checks a source distribution: with torch it builds a wheel, without it says in one line what is
missing.

``python release/check_sdist.py build/dist/foo_ops-*.tar.gz``. The build starts from nothing but the
unpacked files, so it takes as long as the first one of a checkout.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from check_wheel import check_contents

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
        check_build(tree, Path(folder) / "dist")
    print(f"{sdist.name}: {sdist.stat().st_size / 2**20:.1f} MB")


def check_files(tree: Path) -> None:
    """Refuse a source distribution whose package is not that of the tree."""
    expected, found = (sources(root / "foo_ops") for root in (REPOSITORY, tree))
    differing = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    if differing:
        sys.exit(f"the source distribution differs from the tree in {', '.join(differing)}")


def sources(package: Path) -> dict[str, bytes]:
    return {
        path.relative_to(package).as_posix(): path.read_bytes()
        for path in package.rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".typed") and path.name != "_built_for.py"
    }


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


def check_build(tree: Path, folder: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tree)], check=True)
    (wheel,) = folder.iterdir()
    if "+torch" not in wheel.name:
        sys.exit(
            f"the wheel of a source distribution does not say for which torch it is: {wheel.name}"
        )
    check_contents(zipfile.ZipFile(wheel).namelist())


if __name__ == "__main__":
    main()
