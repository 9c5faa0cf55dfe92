"""The manual's wrong programs print the findings shown there, and its right ones none."""

import re
from pathlib import Path

import pytest
from support.processes import python

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "sanitizer.md").read_text()
SECTIONS = re.findall(
    r"^### (.*?)\n.*?```python\n(.*?)```\n\n```text\n(.*?)```\n\n```python\n(.*?)```",
    PAGE,
    re.MULTILINE | re.DOTALL,
)


def run(program, folder):
    path = folder / "program.py"
    path.write_text(program)
    return python(path, folder=folder, FOO_SANITIZER="1")


def as_published(printed, folder):
    printed = re.sub(r"0x[0-9a-f]+", "0x7f0000000040", printed)
    return printed.replace(f"{folder}/", "").strip()


def test_all_kinds_are_there():
    assert [kind.lower() for kind, *_ in SECTIONS] == [
        "race",
        "use after free",
        "unsynchronized host read",
        "host write during copy",
        "uninitialized read",
        "host access",
    ]


@pytest.mark.parametrize(
    ("wrong", "finding"), [(wrong, finding) for _, wrong, finding, _ in SECTIONS]
)
def test_wrong(tmp_path, wrong, finding):
    process = run(wrong, tmp_path)
    assert process.returncode != 0
    printed = re.split("SanitizerError: |foo_ops.sanitizer: ", process.stderr, maxsplit=1)[1]
    assert as_published(printed, tmp_path) == finding.strip()


@pytest.mark.parametrize("right", [right for *_, right in SECTIONS])
def test_right(tmp_path, right):
    process = run(right, tmp_path)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_front_page(tmp_path, page):
    text = (REPOSITORY / page).read_text()
    ((program, finding),) = re.findall(
        r"```python\n([^`]*)```\n\n```text\n(race: .*?)```", text, re.S
    )
    path = tmp_path / "program.py"
    path.write_text(program)
    process = python(path, folder=tmp_path)
    assert process.returncode == 0, process.stderr
    assert as_published(process.stdout, tmp_path) == finding.strip()
