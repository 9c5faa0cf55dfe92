"""Change the process for the time of a check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from foo_ops import _C


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Seed torch: samples may come from torch.randn, and each call is to give the same."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Set one thread for many small tensors: threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill memory that is not initialised with NaN, or with the largest integer."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextlib.contextmanager
def without_cached_fakes() -> Iterator[None]:
    """Compute each fake tensor: with symbolic sizes an entry of torch's cache costs more."""
    import torch._dynamo.config

    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


Damage = tuple[int, int, int]
"""An address, the bytes that were allocated there, and which one was written beside them."""


@contextlib.contextmanager
def guarded_memory() -> Iterator[list[Damage]]:
    """Put guard bytes around memory of the CPU; the list is what was written beside it, at the end.

    A byte before the memory is negative. Memory of foo is not guarded.
    """
    damages: list[Damage] = []
    _C.guard_memory()
    try:
        yield damages
    finally:
        damages += _C.end_guarded_memory()


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turn errors that are no verdict of a check into one: ``what`` raised them."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forget what another check compiled, in memory or on disk, and leave nothing behind."""
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config

    torch.compiler.reset()
    with (
        # A graph that was kept on disk still calls operators with the schemas of its day.
        torch._functorch.config.patch(enable_autograd_cache=False),
        # Vectors of the compiler's own loops are not what is checked, and a third of its time.
        torch._inductor.config.patch({"fx_graph_cache": False, "cpp.simdlen": 1}),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        without_cached_fakes(),
        # Sizes that are equal by accident, as the 9 of a fixed weight, would be taken for one.
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
    ):
        yield
    torch.compiler.reset()
