"""Draw random numbers: one default generator per device, with the CPU's numbers for a seed."""

from collections.abc import Iterable
from typing import Any

import torch

from foo_ops._C import device as _C
from foo_ops.device._utils import _get_device_index
from foo_ops.device.devices import init

default_generators: tuple[torch.Generator, ...] = tuple(
    _C.default_generator(index) for index in range(_C.device_count())
)


def _generator(device: Any) -> torch.Generator:
    index = _get_device_index(device, optional=True)
    _C.check_device_index(index)
    return default_generators[index]


def get_rng_state(device: Any = "foo") -> torch.Tensor:
    init()
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "foo") -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    init()
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current device with a number from the system."""
    _generator(None).seed()


def seed_all() -> None:
    """Seed all devices with one number from the system."""
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    """Return the seed of the current device."""
    init()
    return _generator(None).initial_seed()
