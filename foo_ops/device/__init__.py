"""The Python module of device ``foo``, installed as ``torch.foo``.

Names and behaviour are those of ``torch.cuda``.
"""

import sys
from typing import Any

import torch

from foo_ops.device import _registration, _utils, amp, graphs, memory, random, streams, tensors
from foo_ops.device.amp import (
    get_amp_supported_dtype,
    get_autocast_dtype,
    is_autocast_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from foo_ops.device.devices import (
    DeviceProperties,
    _exchange_device,
    _is_in_bad_fork,
    _lazy_init,
    _maybe_exchange_device,
    can_device_access_peer,
    current_device,
    device,
    device_count,
    device_of,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    ipc_collect,
    is_available,
    is_bf16_supported,
    is_initialized,
    is_tf32_supported,
    set_device,
    synchronize,
)
from foo_ops.device.graphs import (
    FooGraph,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
    make_graphed_callables,
)
from foo_ops.device.memory import (
    MemPool,
    caching_allocator_alloc,
    caching_allocator_delete,
    change_current_allocator,
    device_memory_used,
    empty_cache,
    get_allocator_backend,
    get_per_process_memory_fraction,
    host_memory_stats,
    host_memory_stats_as_nested_dict,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_host_memory_stats,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_host_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
    use_mem_pool,
)
from foo_ops.device.operators import (
    OperatorCount,
    get_matmul_kernels,
    operator_counts,
    reset_operator_counts,
    set_matmul_kernels,
)
from foo_ops.device.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from foo_ops.device.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    get_sync_debug_mode,
    set_stream,
    set_sync_debug_mode,
    stream,
)
from foo_ops.device.tensors import get_backend_meta, set_backend_meta

OutOfMemoryError = torch.OutOfMemoryError

# torch looks up the names with an underscore in a device module.
__all__ = [
    "DeviceProperties",
    "Event",
    "FooGraph",
    "MemPool",
    "OperatorCount",
    "OutOfMemoryError",
    "Stream",
    "StreamContext",
    "_exchange_device",
    "_initialized",
    "_is_in_bad_fork",
    "_lazy_init",
    "_maybe_exchange_device",
    "_utils",
    "amp",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "can_device_access_peer",
    "change_current_allocator",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_memory_used",
    "device_of",
    "empty_cache",
    "get_allocator_backend",
    "get_amp_supported_dtype",
    "get_autocast_dtype",
    "get_backend_meta",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_matmul_kernels",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "get_sync_debug_mode",
    "graph",
    "graph_pool_handle",
    "graphs",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_autocast_enabled",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "operator_counts",
    "random",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_operator_counts",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_autocast_dtype",
    "set_autocast_enabled",
    "set_backend_meta",
    "set_device",
    "set_matmul_kernels",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_sync_debug_mode",
    "stream",
    "streams",
    "synchronize",
    "use_mem_pool",
]


def __getattr__(name: str) -> Any:
    # torch.utils.checkpoint reads this attribute, whose value changes.
    if name == "_initialized":
        return is_initialized()
    if name in tensors.CLASSES:
        return tensors.CLASSES[name]
    raise AttributeError(f"module 'torch.foo' has no attribute {name!r}")


_registration.register(sys.modules[__name__])
