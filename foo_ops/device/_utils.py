"""Find the device that an argument means, under the name that torch.serialization calls."""

from typing import Any

import torch


def _get_device_index(device: Any, optional: bool = False) -> int:
    """Return the index that an int, a string or a torch.device names.

    None, and ``foo`` without an index, mean the current device where ``optional`` allows it.
    """
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "foo":
            raise ValueError(f"Expected a foo device, but got: {device}")
        if device.index is not None:
            return device.index
    elif device is not None:
        raise TypeError(f"Expected a torch.device, a string or an integer, but got: {device!r}")
    if not optional:
        raise ValueError(
            f"Expected a torch.device with a specified index or an integer, but got: {device}"
        )
    return torch.accelerator.current_device_index()
