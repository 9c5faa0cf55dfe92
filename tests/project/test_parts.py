"""``make test`` leaves out what is marked, and the parts of ``make test-all`` are everything."""

import argparse

import pytest
from conftest import reason_to_leave_out
from support.parts import part, part_of


@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_are_everything(count):
    items = list(range(13))
    parts = [part_of(items, (number, count)) for number in range(1, count + 1)]
    assert sorted(item for one in parts for item in one) == items


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "-1/4", "1/0", "a/b", "1/2/3", "1.5/2"])
def test_wrong_parts(text):
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        part(text)
    assert str(raised.value) == f"part must be K/N with K from 1 to N, got {text!r}"
