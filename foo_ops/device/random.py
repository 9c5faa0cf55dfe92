"""Random numbers: one default generator per device, with the CPU's numbers for each seed."""

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
    """Return the state of a device's generator, with which its numbers can be drawn again.

    Example:
        >>> state = torch.foo.get_rng_state()
        >>> numbers = torch.rand(3, device="foo")
        >>> torch.foo.set_rng_state(state)
        >>> torch.equal(torch.rand(3, device="foo"), numbers)
        True
    """
    init()
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "foo") -> None:
    """Set the state of a device's generator.

    Example:
        >>> state = torch.foo.get_rng_state("foo:1")
        >>> torch.foo.set_rng_state(state, "foo:0")
    """
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of the generator of every device.

    Example:
        >>> len(torch.foo.get_rng_state_all()) == torch.foo.device_count()
        True
    """
    init()
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states that :func:`get_rng_state_all` returned.

    Example:
        >>> torch.foo.set_rng_state_all(torch.foo.get_rng_state_all())
    """
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device.

    Example:
        >>> torch.foo.manual_seed(7)
        >>> numbers = torch.rand(3, device="foo").cpu()
        >>> torch.equal(numbers, torch.rand(3, generator=torch.Generator().manual_seed(7)))
        True
    """
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices, which then draw the same numbers.

    Example:
        >>> torch.foo.manual_seed_all(7)
        >>> [torch.rand(1, device=f"foo:{index}").item() for index in (0, 1)]
        [0.53..., 0.53...]
    """
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current device with a number from the system.

    Example:
        >>> torch.foo.seed()
    """
    _generator(None).seed()


def seed_all() -> None:
    """Seed all devices with one number from the system.

    Example:
        >>> torch.foo.seed_all()
        >>> first, second = (generator.initial_seed() for generator in torch.foo.default_generators)
        >>> first == second
        True
    """
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    """Return the seed of the current device.

    Example:
        >>> torch.foo.manual_seed(7)
        >>> torch.foo.initial_seed()
        7
    """
    init()
    return _generator(None).initial_seed()
