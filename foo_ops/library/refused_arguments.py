"""Let composites refuse the arguments that their operator refuses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from foo_ops.library.nested import require_dense
from foo_ops.library.operators import find, tensors_in


def refusing(name: str, composite: Callable[..., Any]) -> Callable[..., Any]:
    """Return a composite that takes nothing that its operator does not.

    PyTorch's own operators take more: they promote dtypes, broadcast shapes, and some take nested
    tensors. What else is wrong with arguments the operator's fake kernel says, but for what their
    elements are.
    """
    operator = find(name)
    names = [argument.name for argument in operator._schema.arguments]

    @functools.wraps(composite)
    def checked(*args: Any, **kwargs: Any) -> Any:
        require_dense(operator, dict(zip(names, args)) | kwargs)
        fake = torch._library.simple_registry.singleton.find(operator.name()).fake_impl.kernel
        if fake is not None and all(
            it.layout == torch.strided for it in tensors_in((args, kwargs))
        ):
            with _modes_for_fakes():
                positional, named = pytree.tree_map_only(Tensor, _without_data, (args, kwargs))
                fake(*positional, **named)
        return composite(*args, **kwargs)

    return checked


@contextlib.contextmanager
def _modes_for_fakes() -> Iterator[None]:
    """Leave a mode that makes fake tensors, whose sizes may be symbols, and no other.

    Others would look into tensors without data, or count what these are asked.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        yield
        return
    with torch._C._DisableFuncTorch(), torch._C._DisableTorchDispatch():
        yield


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
