"""Train on foo with Lightning: ``Trainer(accelerator="foo", strategy="single_foo", devices=1)``."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry


class FooAccelerator(Accelerator):
    """Device foo as an accelerator of Lightning. :func:`register` registers it by name."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != "foo":
            raise ValueError(
                f'lightning: device must be of type foo, got {device}; pass strategy="single_foo"'
            )
        torch.foo.set_device(device)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        torch.foo.empty_cache()  # type: ignore[attr-defined]

    def get_device_stats(self, device: str | torch.device) -> dict[str, Any]:
        return torch.foo.memory_stats(device)  # type: ignore[attr-defined]

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Return device indices for a number of devices, a list, or a string such as "0,1"."""
        count = FooAccelerator.auto_device_count()
        if isinstance(devices, str):
            numbers = [int(each) for each in devices.split(",") if each.strip()]
            devices = numbers if "," in devices else numbers[0]
        if isinstance(devices, int):
            devices = list(range(count if devices == -1 else devices))
        if not devices or any(not 0 <= index < count for index in devices):
            raise ValueError(f"lightning: devices must be from 0 to {count - 1}, got {devices}")
        return devices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("foo", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.foo.device_count()  # type: ignore[attr-defined]

    @staticmethod
    def is_available() -> bool:
        return torch.foo.is_available()  # type: ignore[attr-defined]

    @staticmethod
    def name() -> str:
        return "foo"


def register() -> None:
    """Register foo with Lightning. A second call changes nothing.

    Lightning chooses a CPU strategy for accelerators that it does not ship, so name one:
    ``"single_foo"``, or ``SingleDeviceStrategy("foo:1")`` for another device.

    ```python
    import lightning
    from foo_ops.integrations.lightning import register

    register()
    trainer = lightning.Trainer(accelerator="foo", strategy="single_foo", devices=1)
    ```
    """
    if "foo" not in AcceleratorRegistry.available_accelerators():
        AcceleratorRegistry.register("foo", FooAccelerator, description="Device foo of foo_ops")
        StrategyRegistry.register(
            "single_foo", SingleDeviceStrategy, description="One device of foo", device="foo:0"
        )
