"""Support torch's context_parallel for our attention, by ring attention.

The context patches only F.scaled_dot_product_attention. Within it our operators, called by
whatever name, would see just the process's own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foo_ops.distributed.ring_attention import attend
from foo_ops.ops.attention.formula import DEFAULTS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ATTENTION = (torch.ops.foo.attention, torch.ops.foo.attention.default)
VARLEN = (torch.ops.foo.attention_varlen, torch.ops.foo.attention_varlen.default)
OPTIONAL = ("attn_bias", "alibi_slopes", "sinks")
# The context may have sharded rows or columns of a bias, and dropout draws by places.
REFUSED = ("attn_bias", "dropout_p")


class ContextParallelMode(TorchFunctionMode):
    """Sends attention round the ring of a mesh's processes.

    Args:
        is_balanced: the layout that the context gave its buffers.
    """

    def __init__(self, mesh: DeviceMesh, is_balanced: bool) -> None:
        super().__init__()
        self._group = mesh.get_group()
        self._is_balanced = is_balanced

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in ATTENTION:
            return self._attention(*args, **kwargs)
        if function in VARLEN:
            raise NotImplementedError(
                "attention_varlen: packed sequences are not supported within context_parallel; use "
                "foo_ops.attention on dense sequences"
            )
        return function(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *added: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        given = dict.fromkeys(OPTIONAL) | DEFAULTS | dict(zip(OPTIONAL, added)) | options
        for name in REFUSED:
            argument = given.pop(name)
            if argument is not None and argument != DEFAULTS.get(name):
                raise NotImplementedError(
                    f"attention: {name} must not be given within context_parallel, since "
                    "foo_ops.distributed.ring_attention does not support this argument"
                )
        return attend(
            query, key, value, None, group=self._group, is_balanced=self._is_balanced, **given
        )


_modes: list[ContextParallelMode] = []


def install() -> None:
    """Enter the mode wherever the context begins, and leave it where it ends.

    Called once torch's module has been imported.
    """
    from foo_ops.compat import (
        context_parallel,
        context_parallel_options,
        disable_context_parallel,
        enable_context_parallel,
    )

    def enable_ours(seq_dim: int, mesh: DeviceMesh) -> None:
        enable_context_parallel(seq_dim, mesh)
        _modes.append(ContextParallelMode(mesh, context_parallel_options.enable_load_balance))
        _modes[-1].__enter__()

    def disable_ours() -> None:
        _modes.pop().__exit__(None, None, None)
        disable_context_parallel()

    setattr(context_parallel, enable_context_parallel.__name__, enable_ours)
    setattr(context_parallel, disable_context_parallel.__name__, disable_ours)
