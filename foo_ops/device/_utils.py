"""The device index of an argument, in a function that torch.serialization calls by name."""

from typing import Any

import torch


def _get_device_index(device: Any, optional: bool = False) -> int:
    """Return the index of an int, a string or a torch.device.

    If ``optional``, None and ``foo`` without an index mean the current device.
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
