"""The Python blocks of the documents run as they stand, and what the documents name exists."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# Its blocks are one program.
TUTORIAL = "docs/kit.md"
PAGES = sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("docs/**/*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *PAGES)
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def text_of(document):
    return (REPOSITORY / document).read_text()


def blocks(document, kind=BLOCK):
    return [textwrap.dedent(block) for _, block in kind.findall(text_of(document))]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("document", "number"),
    [
        (document, number)
        for document in DOCUMENTS
        if document != TUTORIAL
        for number in range(len(blocks(document)))
    ],
)
def test_block_runs(document, number):
    process = run("-c", blocks(document)[number])
    assert process.returncode == 0, process.stderr


def test_tutorial(tmp_path):
    program = tmp_path / "tutorial.py"
    program.write_text("\n".join(blocks(TUTORIAL)))
    process = run(str(program))
    assert process.returncode == 0, process.stderr
    assert "tutorial::mish(Tensor x) -> Tensor" in process.stdout
    assert "log_sum_exp: input must have a dimension, got none" in process.stdout
    message = (
        "tutorial::wrong: its kernel cannot be compiled for float32: Unknown attribute 'middle'"
    )
    assert message in process.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_found(document):
    text = text_of(document)
    assert len(blocks(document)) == text.count("```python")
    assert len(blocks(document, SHELL)) == text.count("```sh")


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text_of(document)):
        assert ((REPOSITORY / document).parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document):
    """Folders and files that a document names exist."""
    for name in re.findall(r"`((?:foo_ops|tests|benchmarks)/[\w./*]*)`", text_of(document)):
        if not name.startswith("benchmarks/results/"):
            assert list(REPOSITORY.glob(name)), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document):
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join(blocks(document, SHELL))):
        assert target in targets


def test_front_page_is_short():
    assert text_of("README.md").count("\n") <= 150
