"""The Python blocks of the documents run as they stand, each in a fresh process."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# A block that starts so is a file of the package.
FILE = re.compile(r"# (foo_ops/\S+\.py)\n")

# The files of a document lie in a folder of their own, beside those that the package has.
FIND_FILES = """\
import sys
import foo_ops.kernels, foo_ops.ops
for package in (foo_ops.kernels, foo_ops.ops):
    package.__path__.append(f"{sys.argv[1]}/{package.__name__.replace('.', '/')}")
"""


def blocks(document):
    text = (REPOSITORY / document).read_text()
    return [textwrap.dedent(block) for _, block in BLOCK.findall(text)]


def runnable():
    return [
        pytest.param(document, block, id=f"{document}-{number}")
        for document in DOCUMENTS
        for number, block in enumerate(blocks(document), 1)
        if not FILE.match(block)
    ]


@pytest.mark.parametrize(("document", "block"), runnable())
def test_block_runs(document, block, tmp_path):
    files = {FILE.match(text)[1]: text for text in blocks(document) if FILE.match(text)}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    modules = [name.removesuffix(".py").replace("/", ".") for name in files]
    needs_files = any(module in block for module in modules)
    program = FIND_FILES * needs_files + block
    options = ["-W", "error::UserWarning"]
    process = subprocess.run(
        [sys.executable, *options, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


def test_every_python_block_is_found():
    for document in (*DOCUMENTS, "docs/tutorial.md"):
        text = (REPOSITORY / document).read_text()
        assert len(blocks(document)) == text.count("```python") > 0


def test_links_lead_somewhere():
    for document in (*DOCUMENTS, "CHANGELOG.md"):
        text = (REPOSITORY / document).read_text()
        for target in re.findall(r"\]\((?!https?://|#)([^)]+)\)", text):
            assert (REPOSITORY / target).exists(), f"{document}: {target}"


def test_paths_exist():
    """Folders and files that CONTRIBUTING.md names."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`((?:foo_ops|tests|benchmarks)/[\w./*]*)`", text):
        if not name.startswith("benchmarks/results/"):
            assert list(REPOSITORY.glob(name)), name


def test_tutorial(tmp_path):
    """Its blocks are one program."""
    program = tmp_path / "tutorial.py"
    program.write_text("\n".join(blocks("docs/tutorial.md")))
    options = ["-W", "error::UserWarning"]
    process = subprocess.run(
        [sys.executable, *options, str(program)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "tutorial::mish(Tensor x) -> Tensor" in process.stdout
    assert "log_sum_exp: input must have a dimension, got none" in process.stdout
    message = (
        "tutorial::wrong: its kernel cannot be compiled for float32: Unknown attribute 'middle'"
    )
    assert message in process.stdout
