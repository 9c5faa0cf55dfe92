"""Let fake tensors say of results on foo what they say of those on the CPU.

The CPU's kernels run on foo, so that sizes and strides are the CPU's. torch asks for the device
where its own differ in that, and takes foo for one of the others. Imported together with
torch._subclasses.fake_impls.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import _meta_registrations
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

# Others ask _meta_registrations.device_hint.
CONVOLUTIONS = (
    aten.convolution.default,
    aten._convolution.default,
    aten._convolution.deprecated,
    aten.convolution_backward.default,
)


def _moved(values: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    with in_kernel_invocation_manager(mode):
        return tree_map_only(FakeTensor, lambda fake: FakeTensor(mode, fake, device), values)


def _as_on_cpu(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    def call(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        device = next(leaf.fake_device for leaf in leaves if isinstance(leaf, FakeTensor))
        if device.type != "foo":
            return of_torch(mode, func, *args, **kwargs)
        host_args, host_kwargs = _moved((args, kwargs), mode, torch.device("cpu"))
        return _moved(of_torch(mode, func, *host_args, **host_kwargs), mode, device)

    return call


_device_hint = _meta_registrations.device_hint


def _device_hint_of_kernel(tensor: Any) -> str:
    device = _device_hint(tensor)
    return "cpu" if device == "foo" else device


def register() -> None:
    kernels = fake_impls.op_implementations_dict
    for operator in CONVOLUTIONS:
        kernels[operator] = _as_on_cpu(kernels[operator])
    _meta_registrations.device_hint = _device_hint_of_kernel
