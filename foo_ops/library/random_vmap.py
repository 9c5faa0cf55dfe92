"""Map operators that draw random numbers, as the argument ``randomness`` of torch.vmap says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from foo_ops.library.operators import Parameter, find, keep, tensors_in
from foo_ops.library.vmap import Rule, vmap_by_loop

# Of all calls under torch.vmap, also of those whose tensors are not mapped.
_MODE = DispatchKey.FuncTorchVmapMode
# In the words of torch's own random operators.
_REFUSAL = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
    "'different' randomness flags on vmap or perform the randomness operation out of vmap"
)


def register_random_vmap(
    operator: torch._ops.OpOverload, lib: torch.library.Library | None
) -> None:
    """Refuse a call under ``randomness="error"``; let "different" map a call that maps nothing."""

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        interpreter: Any = retrieve_current_functorch_interpreter()
        if interpreter.randomness() == "error":
            raise RuntimeError(_REFUSAL)
        if interpreter.randomness() == "different":
            args = _mapped(args, interpreter.batch_size(), interpreter.level())
            keys = keys | DispatchKeySet(DispatchKey.FuncTorchBatched)
        rest = torch._C._dispatch_keyset_full_after(_MODE)
        return operator.redispatch(keys & rest, *args, **kwargs)

    name = operator.name()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, _MODE.name):
        own = torch.library.Library(name.partition("::")[0], "FRAGMENT")
        own.impl(name, kernel, _MODE.name, with_keyset=True)
        keep(_Registration(own), lib)


class _Registration:
    """Ends with the library of the operator."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library

    def destroy(self) -> None:
        self._library._destroy()


def _mapped(args: tuple[Any, ...], size: int, level: int) -> tuple[Any, ...]:
    """Map the first tensor, if no tensor is mapped at this level."""
    from torch._C._functorch import _add_batch_dim, is_batchedtensor, maybe_get_level

    tensors = tensors_in(args)
    is_mapped = any(is_batchedtensor(x) and maybe_get_level(x) == level for x in tensors)
    if is_mapped or not tensors:
        return args
    first = next(place for place, it in enumerate(args) if isinstance(it, Tensor))
    repeated = args[first].expand(size, *args[first].shape)
    return (*args[:first], _add_batch_dim(repeated, 0, level), *args[first + 1 :])


def make_random_loop(name: str, parameters: tuple[Parameter, ...]) -> Rule:
    """Make the rule of an operator with a generator: a call for each element.

    For the same numbers in all of them the generator is put back before each but the first.
    """
    generators = [parameter.name for parameter in parameters if parameter.kind == "generator"]

    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any, **keywords: Any) -> Any:
        operator: Any = find(name)
        device = tensors_in(inputs)[0].device
        given = dict(zip((p.name for p in parameters), inputs)) | keywords
        drawn_from = [given.get(generator) or _default(device) for generator in generators]
        states = [generator.get_state() for generator in drawn_from]

        def call(*args: Any, **kwargs: Any) -> Any:
            if info.randomness == "same":
                for generator, state in zip(drawn_from, states):
                    generator.set_state(state)
            return operator(*args, **kwargs)

        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_MODE)):
            return vmap_by_loop(call, info, in_dims, *inputs, **keywords)

    return vmap


def _default(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device).default_generators
    return generators[device.index or 0]
