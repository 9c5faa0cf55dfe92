"""Makes fake tensors on foo predict the same results as on the CPU.

The CPU's kernels run on foo, so sizes and strides are the CPU's, and a number can be read without
waiting. Where devices differ in that, torch checks the device type, and treats foo as one of the
other devices. Imported together with torch._subclasses.fake_impls.
"""

from collections.abc import Callable
from typing import Any

import torch

from foo_ops.compat import (
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    fake_impls,
    in_kernel_invocation_manager,
    meta_registrations,
    no_dispatch,
    pytree,
)

aten = torch.ops.aten

# Other operators call _meta_registrations.device_hint.
CONVOLUTIONS = (
    aten.convolution.default,
    aten._convolution.default,
    aten._convolution.deprecated,
    aten.convolution_backward.default,
)


def _moved(values: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    with in_kernel_invocation_manager(mode):
        return pytree.tree_map_only(FakeTensor, lambda fake: FakeTensor(mode, fake, device), values)


def _as_on_cpu(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    def call(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        device = next(leaf.fake_device for leaf in leaves if isinstance(leaf, FakeTensor))
        if device.type != "foo":
            return of_torch(mode, func, *args, **kwargs)
        host_args, host_kwargs = _moved((args, kwargs), mode, torch.device("cpu"))
        return _moved(of_torch(mode, func, *host_args, **host_kwargs), mode, device)

    return call


def _histc(mode: FakeTensorMode, func: Any, input: FakeTensor, bins: int = 100, *_: Any) -> Any:
    """Support integer inputs, as foo does; torch rejects them where the device hint is cpu."""
    is_of_integers = not (input.dtype.is_floating_point or input.dtype == torch.bool)
    if input.fake_device.type != "foo" or not is_of_integers or bins <= 0:
        return NotImplemented
    return input.new_empty(bins)


_device_hint = meta_registrations.device_hint


def _device_hint_of_kernel(tensor: Any) -> str:
    device = _device_hint(tensor)
    return "cpu" if device == "foo" else device


_from_real_tensor = FakeTensorConverter.from_real_tensor


def _with_its_number(
    self: FakeTensorConverter, mode: FakeTensorMode, tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> FakeTensor:
    """Give a 0-d graph input the symbol of its number, as torch does only on the CPU."""
    is_new_input = kwargs.get("source") is not None and self._get_memo(tensor) is None
    fake = _from_real_tensor(self, mode, tensor, *args, **kwargs)
    if is_new_input and tensor.device.type == "foo" and tensor.dim() == 0:
        with no_dispatch():
            host = tensor.detach().cpu()
        fake.item_memo = _from_real_tensor(self, mode, host, *args, **kwargs).item_memo
    return fake


def register() -> None:
    method: Any = _with_its_number
    FakeTensorConverter.from_real_tensor = method
    kernels = fake_impls.op_implementations_dict
    for operator in CONVOLUTIONS:
        kernels[operator] = _as_on_cpu(kernels[operator])
    kernels[aten.histc.default] = _histc
    meta_registrations.device_hint = _device_hint_of_kernel
