"""Count which kernels the operators on foo ran on."""

from typing import NamedTuple

from foo_ops._C import device as _C


class OperatorCount(NamedTuple):
    """How often an operator ran on a kernel of foo's own, and on the CPU's by the fallback."""

    own: int
    fallback: int


def operator_counts() -> dict[str, OperatorCount]:
    """Return how often each operator has run on foo, by its name with the overload.

    Operators that are made of others do not appear, but those they call do. A backend is brought
    up by giving kernels of its own to what runs often through the fallback.

    >>> torch.foo.reset_operator_counts()
    >>> total = torch.ones(3, device="foo").view(1, 3) + 1
    >>> torch.foo.operator_counts()["aten::add.Tensor"]
    OperatorCount(own=0, fallback=1)
    """
    return {name: OperatorCount(*counts) for name, counts in _C.operator_counts().items()}


def reset_operator_counts() -> None:
    """Let :func:`operator_counts` begin again at nothing.

    Example:
        >>> torch.foo.reset_operator_counts()
        >>> torch.foo.operator_counts()
        {}
    """
    _C.reset_operator_counts()
