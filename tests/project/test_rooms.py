"""Each folder is a room that may import the rooms below it, and no file has more than 1,000 lines.

A room is a folder or a file: see docs/architecture.md.
"""

import ast
import graphlib
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "foo_ops"
LINES = 1000
CPP = (".cpp", ".h")


def rooms():
    """Return the rooms of docs/architecture.md, each with the rooms that it may import."""
    text = (REPOSITORY / "docs/architecture.md").read_text()
    table = re.findall(r"^\| `(\S+)` \|.*\|(.*)\|$", text, re.MULTILINE)
    return {
        room.rstrip("/"): [it.rstrip("/") for it in re.findall(r"`(\S+)`", others)]
        for room, others in table
    }


ROOMS = rooms()
COMPANION = "foo_ops._C"
# Every room may import these, except that kernels may not import the companion: it calls them.
IN_NO_ROOM = (COMPANION, "foo_ops.__version__", "foo_ops._built_for")
OUTSIDE_OF_KERNELS = [f"foo_ops/{it}" for it in ROOMS if not it.startswith(("kernels", "csrc"))]
LIBRARIES = {
    "torch": [*OUTSIDE_OF_KERNELS, "benchmarks"],
    "numba": ["foo_ops/kernels", "benchmarks"],
    "llvmlite": [
        *("foo_ops/kernels/compiler", "foo_ops/kernels/flex", "foo_ops/kernels/lang"),
        *("foo_ops/kernels/math", "foo_ops/kernels/simd"),
        *("foo_ops/info.py", "benchmarks/peaks.py"),
    ],
    # One module reads users' functions; the other reads the text of lists.
    "dis": ["foo_ops/kernels/compiler/inspection.py"],
    "ast": ["foo_ops/kernels/compiler/inspection.py", "foo_ops/device/_inductor.py"],
}
"""Folders and files that may import these third-party libraries."""


def module_name(path):
    *folders, last = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(folders if last == "__init__" else [*folders, last])


# The build writes this module.
MODULES = {
    module_name(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "_built_for.py"
}
FILES = [
    *MODULES.values(),
    *(it for it in sorted((PACKAGE / "csrc").rglob("*")) if it.suffix in CPP),
]


def room_of(path):
    """Return the room of a file, or None."""
    name = path.relative_to(PACKAGE)
    names = (str(it) for it in (name, *name.parents))
    return next((it for it in names if it in ROOMS), None)


def allowed(room):
    """Return the room itself, and all rooms below it."""
    found, waiting = set(), [room]
    while waiting:
        room = waiting.pop()
        if room not in found:
            found.add(room)
            waiting += ROOMS[room]
    return found


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports have the full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES or full in IN_NO_ROOM else node.module


def included_files(path):
    for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
        yield PACKAGE / "csrc" / name


def imported_files(path):
    """Return the package's files that a file imports or includes."""
    if path.suffix != ".py":
        return included_files(path)
    ours = (name for name in imported_modules(path) if name.partition(".")[0] == "foo_ops")
    return (MODULES[name] for name in ours if name not in IN_NO_ROOM)


def test_every_file_is_in_a_room():
    assert [str(path) for path in FILES if room_of(path) is None] == []


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_those_below(room):
    files = [path for path in FILES if room_of(path) == room]
    assert files, "the room is empty"
    for path in files:
        for other in imported_files(path):
            assert other.exists(), f"{path} imports {other}"
            assert room_of(other) in allowed(room), f"{path} must not import {other}"


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_is_imported_only_in(library):
    places = [REPOSITORY / name for name in LIBRARIES[library]]
    for path in (*MODULES.values(), *(REPOSITORY / "benchmarks").rglob("*.py")):
        names = {name.partition(".")[0] for name in imported_modules(path)}
        if library in names:
            assert any(it in (path, *path.parents) for it in places), path


def test_kernels_do_not_know_the_companion():
    for path in (PACKAGE / "kernels").rglob("*.py"):
        assert COMPANION not in imported_modules(path), path


def test_modules_do_not_import_each_other_in_a_circle():
    """Imports for annotations and inside of functions count, too."""
    imports = {
        module: {name for name in imported_modules(path) if name in MODULES}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(imports).prepare()


def test_files_have_at_most_1000_lines():
    files = [*REPOSITORY.glob("*.py")]
    for folder in ("foo_ops", "tests", "benchmarks", "examples"):
        found = (REPOSITORY / folder).rglob("*")
        files += [it for it in found if it.suffix in (".py", *CPP)]
    long = {str(it.relative_to(REPOSITORY)) for it in files if it.read_bytes().count(b"\n") > LINES}
    assert long == set()
