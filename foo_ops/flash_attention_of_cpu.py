"""F.scaled_dot_product_attention of the CPU on foo's kernels, where a user asks for it.

    >>> from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    >>> activate_flash_attention_impl("foo")
    >>> query, key, value = torch.randn(3, 1, 2, 5, 16).unbind()
    >>> torch.nn.functional.scaled_dot_product_attention(query, key, value).shape
    torch.Size([1, 2, 5, 16])
    >>> restore_flash_attention_impl()

What torch gives to its own flash attention of the CPU goes to foo::attention then, forward and
backward, eager and compiled, with the masks that it takes. What torch computes by its formula, such
as dropout and masks with gradients, it still does.
"""

from __future__ import annotations

from typing import Any

from torch.nn.attention import register_flash_attention_impl

from foo_ops import _C

NAME = "foo"


class Activation:
    """What torch keeps while foo's kernels are in the place of its own."""

    def __init__(self) -> None:
        self._registration: Any = _C.replace_flash_attention_of_cpu()

    def remove(self) -> None:
        """Put torch's kernels back."""
        self._registration.destroy()


def register() -> None:
    """Tell torch the name, which activates foo's kernels.

    Example:
        >>> "foo" in torch.nn.attention.list_flash_attention_impls()
        True
    """
    register_flash_attention_impl(NAME, register_fn=Activation)
