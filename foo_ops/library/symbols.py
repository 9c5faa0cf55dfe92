"""Check conditions on sizes and numbers that are symbolic in a compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

Condition: TypeAlias = "bool | torch.SymBool"
Sizes: TypeAlias = "Sequence[int | torch.SymInt]"


def holds(condition: Condition) -> bool:
    """Return whether a condition on an operator's arguments is true.

    Fake kernels check sizes with it. If a size depends on data, such as a count of nonzero
    elements, torch.compile assumes that the condition is true and checks it when the program runs.

    Args:
        condition: a comparison of sizes.

    Example:
        >>> input = torch.ones(3, 8)
        >>> foo_ops.library.holds(input.shape[-1] % 4 == 0)
        True
    """
    if isinstance(condition, bool):
        return condition
    # Imported here: it takes 0.3 s, and a caller with a symbolic condition has imported it already.
    from torch.fx.experimental.symbolic_shapes import expect_true

    return expect_true(condition)


def is_known(condition: Condition) -> bool:
    """Return whether a condition is known to be true; False if it depends on data."""
    # For Dynamo a symbolic condition is a bool, too.
    if isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def either(one: Condition, other: Condition) -> Condition:
    """Return ``one or other``, without evaluating symbolic conditions."""
    if isinstance(one, bool):
        return one or other
    return one if other is False else other if other is True else one | other


def have_sizes(sizes: Sizes, expected: Sizes) -> bool:
    """Return whether sizes equal the expected ones, as `holds` does.

    Args:
        sizes: a tensor's shape, or some of it.
        expected: sizes that are known, or those of another tensor.

    Example:
        >>> input, weight = torch.ones(3, 8), torch.ones(8)
        >>> foo_ops.library.have_sizes(weight.shape, input.shape[-1:])
        True
    """
    pairs = zip(sizes, expected)
    return len(sizes) == len(expected) and all(holds(size == other) for size, other in pairs)
