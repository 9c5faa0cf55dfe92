"""Run the CPU's F.scaled_dot_product_attention on foo's kernels, if a user asks for it.

    >>> from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    >>> activate_flash_attention_impl("foo")
    >>> query, key, value = torch.randn(3, 1, 2, 5, 16).unbind()
    >>> torch.nn.functional.scaled_dot_product_attention(query, key, value).shape
    torch.Size([1, 2, 5, 16])
    >>> restore_flash_attention_impl()

Then foo::attention replaces torch's own flash attention of the CPU, forward and backward, eager and
compiled, with the masks that it takes. Calls that torch computes by its formula, such as those with
dropout or masks with gradients, stay with torch.
"""

from __future__ import annotations

from typing import Any

from torch.nn.attention import register_flash_attention_impl

from foo_ops import _C

NAME = "foo"


class Activation:
    """The object that torch keeps while foo's kernels replace its own."""

    def __init__(self) -> None:
        self._registration: Any = _C.replace_flash_attention_of_cpu()

    def remove(self) -> None:
        """Restore torch's kernels."""
        self._registration.destroy()


def register() -> None:
    """Register the name that activates foo's kernels with torch.

    Example:
        >>> "foo" in torch.nn.attention.list_flash_attention_impls()
        True
    """
    register_flash_attention_impl(NAME, register_fn=Activation)
