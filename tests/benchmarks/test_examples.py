"""Rows of the examples: the measured functions compute the same as PyTorch's operators."""

from pathlib import Path

import pytest

from benchmarks import examples
from benchmarks.measure import Limits, measure

TINY = Limits(rounds=3, turn=1e-4, contender=1e-3)


def left_out(function):
    raise NotImplementedError("is not compiled here")


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_rows(name, monkeypatch):
    monkeypatch.setattr(examples, "compiled", left_out)
    monkeypatch.setattr(examples, "EXAMPLES", {name: examples.EXAMPLES[name]})
    cases = list(examples.cases(64, 1))
    assert cases
    for case in cases:
        (result,) = measure(case, TINY)
        assert result.peers() == ["torch"], (case.name, result.failures)


def test_every_operator_has_rows():
    folder = Path(__file__).parents[2] / "examples" / "operators"
    names = {name.partition(" ")[0] for name in examples.EXAMPLES}
    assert names == {path.stem for path in folder.glob("*.py")}
