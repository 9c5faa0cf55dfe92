"""Metadata of a tensor, as used by backends with their own formats."""

import torch

from foo_ops._C import device as _C


def set_backend_meta(tensor: torch.Tensor, version: int, format_number: int) -> None:
    """Mark the memory of a tensor on foo with a version and the number of a format.

    The mark belongs to the memory: every view has it, and so do tensors that ``.to``, ``clone``,
    ``copy.deepcopy`` and ``torch.load`` make from it. Results of other operators do not.
    ``ValueError`` for a tensor that is not a dense one on foo.

    >>> tensor = torch.ones(3, device="foo")
    >>> torch.foo.set_backend_meta(tensor, 1, 29)
    >>> torch.foo.get_backend_meta(tensor.to("foo:1"))
    (1, 29)
    """
    _C.set_backend_meta(tensor, version, format_number)


def get_backend_meta(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the version and number set by :func:`set_backend_meta`, or None.

    Example:
        >>> torch.foo.get_backend_meta(torch.ones(3, device="foo")) is None
        True
    """
    return _C.get_backend_meta(tensor)
