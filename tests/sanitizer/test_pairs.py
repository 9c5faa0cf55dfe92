"""For each kind of finding, wrong programs are reported, and right ones are not."""

import warnings

import pytest
import torch
from support.streams import PAIRS

from foo_ops import sanitizer

CASES = [
    pytest.param(kind, program, id=program.__name__)
    for kind, programs in PAIRS.items()
    for program in programs
]


def findings_of(program, *, right):
    side, other = torch.foo.Stream(), torch.foo.Stream()
    with sanitizer.check() as findings:
        program(side, other, right=right)
    return findings


@pytest.mark.parametrize(("kind", "program"), CASES)
def test_wrong(kind, program):
    assert [finding.kind for finding in findings_of(program, right=False)] == [kind]


@pytest.mark.parametrize(("kind", "program"), CASES)
def test_right(kind, program):
    assert findings_of(program, right=True) == []


@pytest.mark.parametrize(("kind", "program"), CASES)
def test_every_run(kind, program):
    for _ in range(5):
        assert len(findings_of(program, right=False)) == 1
        assert findings_of(program, right=True) == []


def run_wrong(program):
    program(torch.foo.Stream(), torch.foo.Stream(), right=False)
    abs(0)  # An operator on the CPU raises when Python makes its next call.


@pytest.mark.parametrize(("kind", "program"), CASES)
def test_raised(kind, program):
    sanitizer.enable()
    try:
        with pytest.raises(sanitizer.SanitizerError) as raised:
            run_wrong(program)
        assert type(raised.value) is sanitizer.SanitizerError
        assert raised.value.finding.kind == kind
        program(torch.foo.Stream(), torch.foo.Stream(), right=True)
    finally:
        sanitizer.disable()


@pytest.mark.parametrize(("kind", "program"), CASES)
def test_warning_that_is_an_error(kind, program):
    sanitizer.enable(action="warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(sanitizer.SanitizerWarning, match=f"^{kind}: "):
                run_wrong(program)
    finally:
        sanitizer.disable()
