"""Ask about sizes and numbers that a compiled program leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

Condition: TypeAlias = "bool | torch.SymBool"
Sizes: TypeAlias = "Sequence[int | torch.SymInt]"


def holds(condition: Condition) -> bool:
    """Return whether what an operator requires of its arguments is true.

    Fake kernels ask so about sizes. Where one depends on data, such as a count of nonzero elements,
    torch.compile takes the condition for true and checks it when the program runs.

    Args:
        condition: a comparison of sizes.

    Example:
        >>> input = torch.ones(3, 8)
        >>> foo_ops.library.holds(input.shape[-1] % 4 == 0)
        True
    """
    if isinstance(condition, bool):
        return condition
    # Imported here: it takes 0.3 s, and whoever has such a condition has it already.
    from torch.fx.experimental.symbolic_shapes import expect_true

    return expect_true(condition)


def is_known(condition: Condition) -> bool:
    """Return whether a condition is true; where it depends on data, it is not known to be."""
    # Dynamo calls a symbolic condition a bool.
    if isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def either(one: Condition, other: Condition) -> Condition:
    """Return whether one of two conditions is true, without asking."""
    if isinstance(one, bool):
        return one or other
    return one if other is False else other if other is True else one | other


def have_sizes(sizes: Sizes, expected: Sizes) -> bool:
    """Return whether sizes are those that a tensor must have, as `holds` does.

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
