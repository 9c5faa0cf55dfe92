"""Cut a long list of tests into parts that can run side by side, or one with each commit."""

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")
Part = tuple[int, int]
"""K and N: the Kth of N parts, from 1."""


def part(text: str) -> Part:
    """Parse the option K/N and return both numbers."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"part must be K/N with K from 1 to N, got {text!r}")
    return int(number), int(count)


def whole(*values: object) -> list[Any]:
    """Mark parameter values that ``make test-all`` runs and ``make test`` does not.

    A tuple has a value for each of several parameters.
    """
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*each, marks=pytest.mark.whole) for each in several]


def part_of(items: Sequence[Item], part: Part) -> Sequence[Item]:
    """Return every Nth item from the Kth on: neighbours are alike, so parts get some of each."""
    number, count = part
    return items[number - 1 :: count]
