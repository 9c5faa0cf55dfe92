"""Check operators that draw random numbers by their means, over calls with one seed each.

No single result can be compared with a reference, but the mean of many can. Its error bound follows
from the spread of the results (Maurer and Pontil 2009, theorem 4): for normal numbers seven
standard deviations of the mean. The seeds are the same in every run, and so is the verdict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from foo_ops.testing.tolerance import TOLERANCES, Tolerances

Tensors = tuple[Tensor, ...]

# The logarithm of 2 / 1e-10: a correct mean exceeds the bound with probability 1e-10.
_LOG = 23.7


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed the default generators of the CPU and of foo, and restore them at the end."""
    foo = range(torch.get_device_module("foo").device_count())
    with torch.random.fork_rng(foo, device_type="foo"):
        torch.manual_seed(seed)
        yield


class Mean:
    """The elementwise mean of tensors, and a bound on its distance from the expectation."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = self._square = self._most = torch.zeros(())

    def add(self, value: Tensor) -> None:
        wide = value.detach().cpu().to(torch.float64)
        self._count += 1
        self._sum = self._sum + wide
        self._square = self._square + wide.square()
        self._most = torch.maximum(self._most, wide.abs())

    def value(self) -> Tensor:
        return self._sum / self._count

    def bound(self, expected: Tensor) -> Tensor:
        """Bound the distance of the mean from the expectation."""
        count = self._count
        variance = (self._square / count - self.value().square()).clamp(min=0) * count / (count - 1)
        # An event that never occurred may be rare: its size is at least that of the expectation.
        largest = torch.maximum(self._most, expected.abs())
        return (2 * variance * _LOG / count).sqrt() + 7 * largest * _LOG / (3 * (count - 1))


def means(call: Callable[[], Sequence[Tensor]], draws: int) -> list[Mean]:
    """Return the mean of each tensor that ``call`` returns, over calls with one seed each."""
    found: list[Mean] = []
    with seeded():
        for seed in range(draws):
            torch.manual_seed(seed)
            tensors = call()
            found = found or [Mean() for _ in tensors]
            for mean, tensor in zip(found, tensors):
                mean.add(tensor)
    return found


def budget_of(mean: Mean, dtype: torch.dtype, expected: Tensor, given: Tolerances) -> Tensor:
    """Return the bound of a mean, plus the rounding to the results' dtype."""
    relative, absolute = (TOLERANCES | dict(given)).get(dtype, (0.0, 0.0))
    return mean.bound(expected) + relative * expected.abs() + absolute
