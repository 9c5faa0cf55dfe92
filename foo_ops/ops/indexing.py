"""Find elements, in kernels whose arrays have any number of dimensions and any strides."""

from __future__ import annotations

from typing import Any


def offset_of(view: Any, of: Any, number: Any, trailing: Any) -> Any:
    """Return the offset of an element of a view, by its number in the order of rows.

    Args:
        view: is broadcast over the leading dimensions of another.
        of: the other, whose elements are counted; it may be the view itself.
        number: counts over all dimensions of ``of`` but the trailing ones.
        trailing: how many these are.
    """
    offset = 0
    for back in range(trailing + 1, of.ndim + 1):
        index = number % of.shape[-back]
        number = number // of.shape[-back]
        if back <= view.ndim and view.shape[-back] > 1:
            offset += index * view.strides[-back]
    return offset
