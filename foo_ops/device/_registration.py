"""Tells torch about device ``foo``: its name, its module, its generated methods."""

import types

import torch


def register(module: types.ModuleType) -> None:
    torch.utils.rename_privateuse1_backend("foo")
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module("foo", module)
