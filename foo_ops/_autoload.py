"""Entry point of the group ``torch.backends``: torch calls it at the end of its own import.

This module imports torch only inside its function, so that ``import foo_ops`` and ``import torch``
work in either order.
"""


def autoload() -> None:
    """Load the compiled companion, register the device and the operators. Idempotent."""
    import foo_ops._C
    import foo_ops.device
    import foo_ops.ops  # noqa: F401
