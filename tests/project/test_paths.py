"""Files named in comments, docstrings and documents exist."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("foo_ops", "tests", "benchmarks", "examples", "docs")
SOURCES = sorted(
    str(path.relative_to(REPOSITORY))
    for folder in FOLDERS
    for path in (REPOSITORY / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h", ".md")
)
# A path has a slash and an extension of the repository's files, and is not part of an address.
PATH = re.compile(r"(?<![\w/.:<~-])(?:\.\./)*(?:[\w.-]+/)+[\w-]+\.(?:py|cpp|h|md)\b")
# A bare name must belong to some file of the repository.
NAME = re.compile(r"(?<![\w/.-])[a-z_]\w*\.(?:py|cpp|h)\b")
NAMES = {"llama.cpp", "script.py", "setup.py", *(Path(source).name for source in SOURCES)}
# Folders of PyTorch, and of files that programs write.
OTHERS = ("ATen/", "c10/", "torch/", "test/", "build/", "benchmarks/results/")


def docstrings(source):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    return [ast.get_docstring(node) or "" for node in nodes]


def prose(name, source):
    """Return the comments and docstrings of a source, or all of a document."""
    if name.endswith(".py"):
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
        return "\n".join([*comments, *docstrings(source)])
    return source if name.endswith(".md") else "\n".join(re.findall(r"//.*", source))


def missing(name, source):
    """Return paths in a file that exist neither from the root nor beside the file."""
    places = (REPOSITORY, REPOSITORY / "foo_ops", (REPOSITORY / name).parent)
    text = prose(name, source)
    paths = [path for path in PATH.findall(text) if not path.startswith(OTHERS)]
    missing_paths = [it for it in paths if not any((place / it).exists() for place in places)]
    return [*missing_paths, *(it for it in NAME.findall(text) if it not in NAMES)]


@pytest.mark.parametrize("name", [*SOURCES, "README.md", "CONTRIBUTING.md", "setup.py"])
def test_paths_exist(name):
    assert missing(name, (REPOSITORY / name).read_text()) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("foo_ops/a.py", '"""See foo_ops/ops/no.py and foo_ops/ops/abs.py."""\nx = "a/b.py"'),
        ("foo_ops/a.py", "# (see csrc/launch/kernel_table.h; foo_ops/ops/no.py)\n"),
        ("foo_ops/csrc/a.cpp", '#include "no/no.h"\n// As foo_ops/ops/no.py has it.'),
        ("docs/a.md", "[abs](../foo_ops/ops/abs.py) and `foo_ops/ops/no.py`"),
    ],
)
def test_a_missing_file_would_be_noticed(name, source):
    assert missing(name, source) == ["foo_ops/ops/no.py"]


def test_a_missing_name_would_be_noticed():
    assert missing("foo_ops/a.py", "# As in abs.py, kernel_table.h and no.py.\n") == ["no.py"]
