"""DLPack's device type for ``foo``."""

import enum
from typing import Any

import torch

_of_other_devices = torch.Tensor.__dlpack_device__


def _dlpack_device(self: torch.Tensor) -> tuple[enum.IntEnum, int]:
    """Return device type and index, for ``from_dlpack``."""
    from torch.utils.dlpack import DLDeviceType

    if self.device.type == "foo" and not torch.overrides.has_torch_function_unary(self):
        return DLDeviceType.kDLExtDev, self.get_device()
    return _of_other_devices(self)


def register() -> None:
    """Replace ``Tensor.__dlpack_device__``: torch 2.13's own looks for the name privateuse1."""
    method: Any = _dlpack_device
    torch.Tensor.__dlpack_device__ = method  # type: ignore[method-assign]
