"""Choice of kernels for operators on foo, and counts of their calls."""

from typing import NamedTuple

from foo_ops._C import device as _C


class OperatorCount(NamedTuple):
    """How often an operator ran by foo's own kernel, and by the CPU's as a fallback."""

    own: int
    fallback: int


def operator_counts() -> dict[str, OperatorCount]:
    """Return how often each operator has run on foo, by its name with the overload.

    Composite operators do not appear, but the operators that they call do. To bring up a backend,
    write kernels for the operators that often use the fallback.

    >>> torch.foo.reset_operator_counts()
    >>> total = torch.ones(3, device="foo").view(1, 3) + 1
    >>> torch.foo.operator_counts()["aten::add.Tensor"]
    OperatorCount(own=0, fallback=1)
    """
    return {name: OperatorCount(*counts) for name, counts in _C.operator_counts().items()}


def reset_operator_counts() -> None:
    """Reset :func:`operator_counts`.

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
        kernels: ``foo``, the default, for the kernels of `foo_ops.linear`, which are faster on many
            processors. ``cpu`` for PyTorch's own, so that results equal the CPU's to the last bit,
            like those of other operators.

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
