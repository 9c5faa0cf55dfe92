"""Which device an argument means. torch.serialization calls ``torch.foo._utils`` by this name."""

from typing import Any

import torch


def _get_device_index(device: Any, optional: bool = False) -> int:
    """The index that an int, a string or a torch.device names.

    None, and ``foo`` without an index, mean the current device where ``optional`` allows it.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type != "foo":
        raise ValueError(f"Expected a foo device, but got: {device}")
    return torch._utils._get_device_index(device, optional=optional)
