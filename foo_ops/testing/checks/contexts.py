"""Context managers that change global state during a check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from foo_ops import _C


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Seed torch, so that samples from torch.randn are the same in each call."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of threads; for small tensors 1, since more would mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN, or with the largest integer."""
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
    """Disable torch's cache of fake tensors, which costs more than it saves with symbolic sizes."""
    import torch._dynamo.config

    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


Damage = tuple[int, int, int]
"""The address and size of an allocation, and the offset of the byte written outside of it."""


@contextlib.contextmanager
def guarded_memory() -> Iterator[list[Damage]]:
    """Put guard bytes around CPU memory; at the end, the list has the damaged ones.

    Offsets before the memory are negative. Memory of foo is not guarded.
    """
    damages: list[Damage] = []
    _C.guard_memory()
    try:
        yield damages
    finally:
        damages += _C.end_guarded_memory()


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turn other errors into an AssertionError that says what raised them."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Ignore graphs that other checks compiled, in memory or on disk, and leave none behind."""
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config

    torch.compiler.reset()
    with (
        # Graphs cached on disk call operators with the schemas of their time.
        torch._functorch.config.patch(enable_autograd_cache=False),
        # The compiler's own vectorized loops are not under test, and take a third of its time.
        torch._inductor.config.patch({"fx_graph_cache": False, "cpp.simdlen": 1}),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        without_cached_fakes(),
        # Otherwise sizes that are equal by accident, such as the 9 of a fixed weight, become one
        # symbol.
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
    ):
        yield
    torch.compiler.reset()
