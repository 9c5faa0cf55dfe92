"""Check that fake tensors of a device announce sizes and strides of results, for torch.compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def to_channels_last(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    memory_format = CHANNELS_LAST.get(value.dim(), torch.contiguous_format)
    return value.detach().contiguous(memory_format=memory_format)


def _layouts(result: Any) -> list[Any]:
    return [
        (leaf.dtype, tuple(leaf.shape), leaf.stride())
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested
    ]


def check_announced(result: Any, call_with: Callable[[Any], Any], what: str) -> None:
    """``call_with`` makes the call that had this result on what a function makes of its tensors."""
    mode = FakeTensorMode()

    def to_fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    call = call_with(to_fake)
    try:
        with mode:
            announced = call()
    except (DataDependentOutputException, DynamicOutputShapeException):
        return  # values decide, and fake tensors have none
    actual, expected = _layouts(result), _layouts(announced)
    assert actual == expected, f"{what}: layout {actual}, announced {expected}"
