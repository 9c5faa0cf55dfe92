"""Copies the tree into a folder of its own, whose constraints name another torch.

``python release/copy_tree.py 2.15.0 build/torch-2.15.0``. The torch is a version, or the file of a
wheel. A second run copies what has changed, and removes what is gone; what was built there stays.
Runs before there is an environment: the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
CONSTRAINTS = "constraints.txt"
ZENTORCH = {"2.13": "2.13.0.2", "2.14": "2.14.0.1"}
"""The zentorch that is made for a torch."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("torch", help="a version, or the file of a wheel")
    parser.add_argument("copy", type=Path, help="the folder")
    arguments = parser.parse_args()
    names = sources()
    copy_files(names, arguments.copy)
    text = constraints((REPOSITORY / CONSTRAINTS).read_text(), arguments.torch)
    target = arguments.copy / CONSTRAINTS
    # Its time stays where nothing changes, so that make installs nothing.
    if not target.exists() or target.read_text() != text:
        target.write_text(text)


def sources() -> list[str]:
    """Return the files of the tree that are not ignored: those of git, and new ones."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and os.path.lexists(REPOSITORY / name)]
    return [name for name in names if name != CONSTRAINTS]


def copy_files(names: list[str], copy: Path) -> None:
    """Copy what differs in size or time, and remove what an earlier run copied and is gone."""
    copied = copy / ".copied"
    earlier = copied.read_text().splitlines() if copied.exists() else []
    for name in set(earlier) - set(names):
        (copy / name).unlink(missing_ok=True)
    for name in names:
        source, target = REPOSITORY / name, copy / name
        if not is_same(source, target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    copied.write_text("\n".join(names))


def is_same(source: Path, target: Path) -> bool:
    if not os.path.lexists(target):
        return False
    states = [path.lstat() for path in (source, target)]
    return len({(state.st_mode, state.st_size, state.st_mtime_ns) for state in states}) == 1


def constraints(text: str, torch: str) -> str:
    """Put another torch into constraints, and the zentorch that is made for it, if there is one."""
    wheel = Path(torch)
    found = re.match(r"(?:torch-)?(\d+\.\d+)\.", wheel.name)
    if found is None:
        sys.exit(f"TORCH must be a version, such as 2.15.0, or the file of a wheel, got {torch}")
    is_wheel = wheel.suffix == ".whl"
    pin = f"torch @ {wheel.resolve(strict=True).as_uri()}" if is_wheel else f"torch=={torch}"
    zentorch = ZENTORCH.get(found[1])
    text = re.sub(r"^torch==.*", lambda _: pin, text, flags=re.MULTILINE)
    line = "" if zentorch is None else f"zentorch=={zentorch}\n"
    return re.sub(r"^zentorch==.*\n", line, text, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
