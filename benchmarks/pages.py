"""Writes generated text into a page, between two marks.

Imports no torch: ``benchmarks.ports`` runs in environments of other processors.
"""

from __future__ import annotations

from pathlib import Path


def begin(name: str) -> str:
    return f"<!-- {name}: begin -->"


def end(name: str) -> str:
    return f"<!-- {name}: end -->"


def replace_between_marks(page: Path, name: str, text: str) -> None:
    """Replace the text between the marks of a name.

    Raises:
        ValueError: if the page lacks a mark.
    """
    before, found_begin, rest = page.read_text().partition(begin(name))
    _, found_end, after = rest.partition(end(name))
    if not (found_begin and found_end):
        raise ValueError(f"{page} must have the marks {begin(name)} and {end(name)}")
    page.write_text(f"{before}{begin(name)}\n\n{text.strip()}\n\n{end(name)}{after}")
