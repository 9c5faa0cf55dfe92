"""Memoizes results of references, which many checks share.

A sample is the same on every device, in most layouts, and in the checks of values, of gradients and
of compiled graphs. A reference depends on nothing but the values of its arguments.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from foo_ops.testing.tolerance import gradients_of, spreads_of_gradients

Tensors = tuple[Tensor, ...]

T = TypeVar("T")
MOST, MOST_BYTES = 4096, 16 << 20
"""Limits of the results kept per operator, and of their bytes. Neighbouring cases share them."""
# Types for which equal values mean equal results.
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class Remembered:
    """Results by the contents of their arguments; the oldest are dropped.

    The latest result is kept, however large it is.
    """

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._results: OrderedDict[Hashable, Any] = OrderedDict()
        self._bytes = 0

    def result(self, compute: Callable[[], T], *given: Any) -> T:
        """Return the result of ``compute``, which is called only for new arguments.

        Args:
            compute: computes the result from ``given``; nobody may write to it.
            given: tensors, numbers, strings and dtypes, in lists and dicts, too. If there is
                anything else, such as a function, nothing is remembered.
        """
        key = _contents(given)
        if key is None:
            return compute()
        if key not in self._results:
            self._results[key] = compute()
            self._bytes += _size(self._results[key])
            self._forget()
        self._results.move_to_end(key)
        result: T = self._results[key]
        return result

    def _forget(self) -> None:
        while len(self._results) > 1 and (
            len(self._results) > self._most or self._bytes > self._most_bytes
        ):
            _, oldest = self._results.popitem(last=False)
            self._bytes -= _size(oldest)


_latest: tuple[Any, Remembered] = None, Remembered()


def results_of(spec: Any) -> Remembered:
    """Return the results of an operator's reference. Those of the operator before are forgotten:
    checks go through one after the other, and 16 MB of each were 300 MB in the end.
    """
    global _latest
    if _latest[0] is not spec:
        _latest = spec, Remembered()
    return _latest[1]


def _size(result: Any) -> int:
    """Return the total bytes of a result's tensors."""
    if isinstance(result, (list, tuple)):
        return sum(map(_size, result))
    return result.nbytes if isinstance(result, Tensor) else 0


def _contents(given: Any) -> Hashable | None:
    """Return a key that is equal for equal contents, bit by bit, or None if there is none."""
    if isinstance(given, Mapping):
        given = (tuple(given), *given.values())
    if isinstance(given, (list, tuple)):
        parts = tuple(map(_contents, given))
        return None if None in parts else (type(given), *parts)
    return _contents_of(given) if _is_plain(given) else None


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, _PLAIN) or (
        isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_quantized
    )


def _contents_of(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf)  # 1, 1.0 and True are equal.
    leaf_on_cpu = leaf.detach().cpu().resolve_conj().resolve_neg()
    numbers = leaf_on_cpu.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    # Processors have instructions for SHA-256: it takes less than half of blake2b's time.
    digest = hashlib.sha256(numbers.numpy().data).digest()
    return leaf.dtype, leaf.shape, leaf.requires_grad, digest


def expected_outputs(
    spec: Any, exact_sample: Any, dtype: torch.dtype
) -> tuple[Tensors, Tensors | None]:
    """Return the reference's outputs, and their budgets if the spec defines some."""
    expected: Tensors = exact_sample.call(spec.reference)
    budget = spec.output_budget
    return expected, None if budget is None else budget(exact_sample, dtype)


def expected_gradients(
    spec: Any, exact_sample: Any, dtypes: tuple[torch.dtype | None, ...], cotangents: Tensors
) -> tuple[Tensors, Sequence[Tensor], Tensors | None]:
    """Return the reference's gradients, and either their spreads or the spec's own budgets."""
    outputs = exact_sample.call(spec.reference)
    if not any(output.requires_grad for output in outputs):
        raise AssertionError(
            "no output of the reference requires a gradient: write it in torch's operators, or say "
            "differentiable=False in the OpSpec"
        )
    tensors = exact_sample.differentiable()
    expected = gradients_of(outputs, tensors, cotangents, once=False)
    if spec.gradient_budget is None:
        return expected, spreads_of_gradients(outputs, tensors, cotangents, expected), None
    with torch.no_grad():
        return expected, (), spec.gradient_budget(exact_sample, dtypes, cotangents)
