"""The walks of docs/architecture.md pass all files that they must, and have what is read there."""

import re
from pathlib import Path

import pytest
from support.processes import python

REPOSITORY = Path(__file__).parents[2]
WALKS = {"foo_ops.ops.abs": 16, "foo_ops.ops.attention.dense": 25}
"""Each module from which a walk begins, and how many files it may pass."""
ITEM = re.compile(r"^(\d+)\. `(\S+)`: ((?:.|\n   )+)", re.MULTILINE)
# Asked on the way for an answer or a conversion, which their names say.
HELPERS = {
    "foo_ops/_operators.py",
    "foo_ops/_process.py",
    "foo_ops/compat.py",
    "foo_ops/kernels/compiler/inspection.py",
    "foo_ops/library/tensor_numbers.py",
}
# Prints the files whose functions run while a module is executed, without the rest of its package.
ENTERED = """
import importlib, inspect, sys, types
import foo_ops
from foo_ops import library

package = types.ModuleType("foo_ops.ops")
package.__path__ = [f"{foo_ops.__path__[0]}/ops"]
sys.modules["foo_ops.ops"] = package
files = set()


def note(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        files.add(frame.f_code.co_filename)


sys.setprofile(note)
importlib.import_module(sys.argv[1])
sys.setprofile(None)
root = foo_ops.__path__[0].removesuffix("foo_ops")
print(*sorted(it.removeprefix(root) for it in files if it.startswith(foo_ops.__path__[0])))
"""


def walks():
    text = (REPOSITORY / "docs/architecture.md").read_text()
    section = text.partition("\n## Two walks\n")[2].partition("\n## ")[0]
    found = []
    for number, file, said in ITEM.findall(section):
        if number == "1":
            found.append([])
        assert int(number) == len(found[-1]) + 1
        found[-1].append((file, said))
    return dict(zip(WALKS, found, strict=True))


@pytest.mark.parametrize("module", WALKS)
def test_walk_is_short_and_its_files_have_what_is_read_there(module):
    walk = walks()[module]
    assert len(walk) <= WALKS[module]
    for file, said in walk:
        path = REPOSITORY / file
        pair = (path, path.with_suffix(".h"))
        text = "".join(it.read_text() for it in pair if it.exists())
        names = re.findall(r"`(\w+)`", said)
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == [], file


@pytest.mark.parametrize("module", WALKS)
def test_walk_passes_all_files_of_python_that_registration_enters(module):
    entered = set(python(ENTERED, module).stdout.split())
    assert "foo_ops/library/kernels.py" in entered
    assert entered - {file for file, _ in walks()[module]} - HELPERS == set()
