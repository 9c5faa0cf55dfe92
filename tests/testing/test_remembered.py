"""Checks compute each reference once for equal inputs, and never confuse two calls."""

import dataclasses

import pytest
import torch

from foo_ops import testing
from foo_ops.testing.spec import Remembered


def test_a_reference_is_asked_once_for_a_sample():
    """Both devices, most layouts and the gradients have the same numbers."""
    calls = []

    def reference(input):
        calls.append(input.detach().clone())
        return input.abs()

    spec = dataclasses.replace(testing.ABS, reference=reference, dtypes=(torch.float32,))
    testing.check_operator(spec, checks=["values", "layouts", "gradients"])
    seen = {(it.shape, bytes(it.numpy().tobytes())) for it in calls}
    # Once for values and once for gradients, for each layout with different numbers.
    assert len(calls) <= 2 * len(seen)
    assert len(calls) < len(testing.cases(spec, ["values", "layouts", "gradients"])) / 3


ALIKE = {
    "bool and int": (True, 1),
    "int and float": (1, 1.0),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "signs of zeros": (torch.zeros(2), -torch.zeros(2)),
    "history": (torch.zeros(2), torch.zeros(2, requires_grad=True)),
    "order": ([1, 2], [2, 1]),
    "structure": ([1, [2]], [[1], 2]),
    "names": ({"a": 1}, {"b": 1}),
    "conjugate": (torch.tensor([1j]), torch.tensor([1j]).conj()),
}


@pytest.mark.parametrize("pair", ALIKE.values(), ids=ALIKE)
def test_what_is_alike_is_told_apart(pair):
    remembered = Remembered()
    assert [remembered.result(object, it) is remembered.result(object, it) for it in pair] == [
        True,
        True,
    ]
    assert remembered.result(object, pair[0]) is not remembered.result(object, pair[1])


def test_strides_do_not_count():
    remembered = Remembered()
    x = torch.arange(6.0).reshape(2, 3)
    assert remembered.result(object, x) is remembered.result(object, x.T.contiguous().T)


def test_what_cannot_be_compared_is_not_remembered():
    remembered = Remembered()
    given = (torch.zeros(2), torch.neg)
    assert remembered.result(object, given) is not remembered.result(object, given)


def test_results_of_the_operator_before_are_forgotten():
    specs = [dataclasses.replace(testing.ABS) for _ in range(2)]
    first = [specs[0].remembered.result(object, 1) for _ in range(2)]
    assert first[0] is first[1]
    assert specs[1].remembered.result(object, 1) is not first[0]
    assert specs[0].remembered.result(object, 1) is not first[0]


def test_large_results_are_forgotten():
    """A test worker held 3 GB, mostly for a few large samples."""
    remembered = Remembered(most_bytes=300)
    small, large = (lambda: torch.zeros(10)), (lambda: (torch.zeros(50), [torch.zeros(50)]))
    first = [remembered.result(small, number) for number in range(7)]
    assert [remembered.result(small, number) is it for number, it in enumerate(first)] == 7 * [True]
    last = remembered.result(large, 7)
    assert remembered.result(large, 7) is last
    again = [remembered.result(small, number) for number in range(7)]
    assert not any(one is other for one, other in zip(first, again))
    assert remembered.result(large, 7) is not last
