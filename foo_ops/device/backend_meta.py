"""Attach numbers to a tensor, as backends with formats of their own do."""

import torch

from foo_ops._C import device as _C


def set_backend_meta(tensor: torch.Tensor, version: int, format_number: int) -> None:
    """Mark the memory of a tensor on foo with a version and the number of a format.

    The mark goes with the memory: every view bears it, and so does what ``.to``, ``clone``,
    ``copy.deepcopy`` and ``torch.load`` make of the tensor. Results of other operators do not.
    ``ValueError`` for a tensor that is not a dense one on foo.

    >>> tensor = torch.ones(3, device="foo")
    >>> torch.foo.set_backend_meta(tensor, 1, 29)
    >>> torch.foo.get_backend_meta(tensor.to("foo:1"))
    (1, 29)
    """
    _C.set_backend_meta(tensor, version, format_number)


def get_backend_meta(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return version and number that :func:`set_backend_meta` gave, or None.

    Example:
        >>> torch.foo.get_backend_meta(torch.ones(3, device="foo")) is None
        True
    """
    return _C.get_backend_meta(tensor)
