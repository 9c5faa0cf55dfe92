"""``make test`` leaves out marked tests, and the parts of ``make test-all`` cover all tests."""

import argparse
import dataclasses
import types

import pytest
from support.parts import part, part_of

from foo_ops.testing import ABS, ATTENTION, cases


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


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """A test as pytest collects it."""

    nodeid: str
    is_whole: bool = False
    is_apart: bool = False
    case: object = None

    @property
    def callspec(self):
        return types.SimpleNamespace(params={"operator_check": self.case} if self.case else {})

    def get_closest_marker(self, name):
        is_marked = self.is_whole and name == "whole"
        return pytest.mark.whole(apart=self.is_apart).mark if is_marked else None


@pytest.fixture
def left_out(request):
    """Provide ``left_out(item, whole=, part=)``, which returns the reason for leaving it out."""
    (conftest,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if hasattr(plugin, "reason_to_leave_out")
    )

    def reason(item, *, whole=False, part=None):
        option = types.SimpleNamespace(whole=whole, part=part)
        return conftest.reason_to_leave_out(types.SimpleNamespace(option=option), item)

    return reason


def test_marked_tests_are_left_out(left_out):
    assert left_out(Item("a.py::test")) == ""
    assert left_out(Item("a.py::test", is_whole=True)) == "of make test-all (--whole)"
    assert left_out(Item("a.py::test", is_whole=True), whole=True) == ""


def test_each_test_is_in_one_part(left_out):
    """Cases of a test stay together, and so do an operator's cases of one dtype."""
    items = [Item(f"a.py::test_{name}[{case}]") for name in range(30) for case in range(3)]
    operators = [
        Item(f"b.py::test_operator[{case.id}]", case=case)
        for spec in (ABS, ATTENTION)
        for case in cases(spec, ["values"])
    ]
    parts = {
        item: {k for k in range(1, 5) if not left_out(item, whole=True, part=(k, 4))}
        for item in [*items, *operators]
    }
    assert {len(one) for one in parts.values()} == {1}
    together = {}
    for item, one in parts.items():
        case = item.case
        name = item.nodeid.partition("[")[0] if case is None else (case.spec.name, case.dtype)
        together.setdefault(name, set()).update(one)
    assert {len(one) for one in together.values()} == {1}
    assert set().union(*together.values()) == {1, 2, 3, 4}
    apart = [Item(f"a.py::test_it[{n}]", is_whole=True, is_apart=True) for n in range(20)]
    assert len({left_out(item, whole=True, part=(1, 4)) for item in apart}) == 2
    assert left_out(items[0], part=(min(parts[items[0]]) % 4 + 1, 4)) == "of other parts"
