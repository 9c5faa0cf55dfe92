"""Which kernels the operators on foo run on, and how often they did."""

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


MATMUL_KERNELS = ("foo", "cpu")


def get_matmul_kernels() -> str:
    """Return whose kernels multiply matrices on foo: ``foo``, or ``cpu``.

    Example:
        >>> torch.foo.get_matmul_kernels()
        'foo'
    """
    return "foo" if _C.has_own_products() else "cpu"


def set_matmul_kernels(kernels: str) -> None:
    """Choose whose kernels multiply matrices on foo, in all threads.

    Args:
        kernels: ``foo``, the default, for those of `foo_ops.linear`, which are faster on many
            processors. ``cpu`` for PyTorch's own, so that results are equal to those of the CPU to
            the last bit, as those of other operators are.

    Raises:
        ValueError: for another name.

    Example:
        >>> torch.foo.set_matmul_kernels("cpu")
        >>> x = torch.randn(300, 300)
        >>> (x @ x).equal((x.foo() @ x.foo()).cpu())
        True
        >>> torch.foo.set_matmul_kernels("foo")
    """
    if kernels not in MATMUL_KERNELS:
        raise ValueError(f"set_matmul_kernels: kernels must be foo or cpu, got {kernels!r}")
    _C.set_own_products(kernels == "foo")
