"""The manual's wrong programs print the findings that it shows, and its right ones none."""

import re
from pathlib import Path

import pytest
from support.processes import python

PAGE = (Path(__file__).parents[2] / "docs" / "sanitizer.md").read_text()
SECTIONS = re.findall(
    r"^### (.*?)\n.*?```python\n(.*?)```\n\n```text\n(.*?)```\n\n```python\n(.*?)```",
    PAGE,
    re.MULTILINE | re.DOTALL,
)


def run(program, folder):
    path = folder / "program.py"
    path.write_text(program)
    return python(path, folder=folder, FOO_SANITIZER="1")


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
    printed = re.sub(r"0x[0-9a-f]+", "0x7f0000000040", printed).replace(f"{tmp_path}/", "")
    assert printed.strip() == finding.strip()


@pytest.mark.parametrize("right", [right for *_, right in SECTIONS])
def test_right(tmp_path, right):
    process = run(right, tmp_path)
    assert process.returncode == 0, process.stderr
