"""Registers device ``foo`` with torch, and puts it into DataParallel, DLPack, the profiler, ..."""

import atexit
import enum
import sys
import threading
import types
from collections.abc import Callable, Sequence
from itertools import chain
from multiprocessing import reduction
from typing import Any

import torch
from torch.autograd import profiler_util
from torch.multiprocessing import reductions

from foo_ops._C import device as _C
from foo_ops._process import after_import
from foo_ops.compat import DYNAMO, FAKE_IMPLS, INDUCTOR, register_device_module, torch_c
from foo_ops.device import devices as foo_devices
from foo_ops.device import streams as foo_streams

# ---------------------------------------------------------------------------- torch.nn.DataParallel

# It sends tensors to several devices and back. torch compiles these functions of
# ``torch.nn.parallel.comm`` only for CUDA; its CPU build lacks them. Here they are put into
# ``torch._C``, where CUDA tensors still go to torch's own.
#
# A program on the CPU may wrap its model in DataParallel, too: without an accelerator torch then
# calls the model directly.


Tensors = list[torch.Tensor]


def _device(index: int) -> torch.device:
    return torch.device("cpu") if index < 0 else torch.device("foo", index)


def _check_on_foo(tensors: Sequence[torch.Tensor]) -> None:
    for position, tensor in enumerate(tensors):
        if tensor.device.type != "foo":
            raise RuntimeError(
                f"Expected all input tensors to be on foo, but tensor at index {position} has "
                f"device {tensor.device}"
            )


def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> Tensors:
    """Return the tensor itself for its own device (the first), and copies for the others."""
    if not devices:
        raise RuntimeError("Expected at least one device to broadcast to")
    if tensor.device.type == "foo" and tensor.get_device() != devices[0]:
        raise RuntimeError("device of src tensor must be first in the broadcast list")
    return [tensor.to(_device(index), non_blocking=True) for index in devices]


def broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> Tensors:
    _check_on_foo(out)
    for position, each in enumerate(out):
        if each.shape != tensor.shape:
            raise RuntimeError(
                "Expected all output tensors to have same shape as the source tensor "
                f"{tuple(tensor.shape)}, but output tensor at index {position} has shape "
                f"{tuple(each.shape)}"
            )
        if each is not tensor:
            each.copy_(tensor, non_blocking=True)
    return list(out)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[Tensors]:
    """Copy each tensor by itself: a common buffer would save no launches here."""
    for position, tensor in enumerate(tensors):
        if devices and tensor.device != _device(devices[0]):
            raise RuntimeError(
                f"all tensors must be on devices[0]: foo:{devices[0]}, but tensor at index "
                f"{position} is on {tensor.device}"
            )
    copies = [broadcast(tensor, devices) for tensor in tensors]
    return [[copy[position] for copy in copies] for position in range(len(devices))]


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> Tensors:
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    elif len(chunk_sizes) != len(devices):
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    else:
        chunks = tensor.split_with_sizes(list(chunk_sizes), dim)
    copies = []
    for position, chunk in enumerate(chunks):
        stream = streams[position] if streams else None
        with foo_streams.stream(stream):
            copies.append(chunk.to(_device(devices[position]), non_blocking=True))
    return copies


def scatter_out(
    tensor: torch.Tensor,
    out: Sequence[torch.Tensor],
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> Tensors:
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    _check_on_foo(out)
    chunks = tensor.split_with_sizes([each.size(dim) for each in out], dim)
    for position, (each, chunk) in enumerate(zip(out, chunks)):
        with foo_streams.stream(streams[position] if streams else None):
            each.copy_(chunk, non_blocking=True)
    return list(out)


def gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    _check_on_foo(tensors)
    if destination is None:
        destination = foo_devices.current_device()
    # Copies to the CPU block, since they are read at once.
    device = _device(destination)
    return torch.cat([each.to(device, non_blocking=device.type == "foo") for each in tensors], dim)


def gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    _check_on_foo(tensors)
    for target, each in zip(out.split_with_sizes([t.size(dim) for t in tensors], dim), tensors):
        target.copy_(each, non_blocking=out.device.type == "foo")
    return out


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_broadcast": broadcast,
    "_broadcast_coalesced": broadcast_coalesced,
    "_broadcast_out": broadcast_out,
    "_gather": gather,
    "_gather_out": gather_out,
    "_scatter": scatter,
    "_scatter_out": scatter_out,
}


_forward = torch.nn.DataParallel.forward


def _is_on_cpu(module: torch.nn.Module) -> bool:
    devices = {tensor.device.type for tensor in chain(module.parameters(), module.buffers())}
    return devices == {"cpu"}


def forward(self: torch.nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """Call a model on the CPU directly, as without foo; torch would raise an error."""
    if self.device_ids and self.src_device_obj.type == "foo" and _is_on_cpu(self.module):
        return self.module(*inputs, **kwargs)
    return _forward(self, *inputs, **kwargs)


def register_with_data_parallel() -> None:
    torch.nn.DataParallel.forward = forward  # type: ignore[method-assign]
    for name, function in FUNCTIONS.items():
        setattr(torch_c, name, _beside(function, getattr(torch_c, name, None)))


def _beside(function: Callable[..., Any], of_cuda: Callable[..., Any] | None) -> Callable[..., Any]:
    if of_cuda is None:
        return function

    def call(tensors: Any, *arguments: Any) -> Any:
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        is_for_foo = foo_devices.is_available() and not (first is not None and first.is_cuda)
        return (function if is_for_foo else of_cuda)(tensors, *arguments)

    return call


# ------------------------------------------------------------------------------------------- DLPack


_of_other_devices = torch.Tensor.__dlpack_device__


def _dlpack_device(self: torch.Tensor) -> tuple[enum.IntEnum, int]:
    """Return device type and index, for ``from_dlpack``."""
    from torch.utils.dlpack import DLDeviceType

    if self.device.type == "foo" and not torch.overrides.has_torch_function_unary(self):
        return DLDeviceType.kDLExtDev, self.get_device()
    return _of_other_devices(self)


def register_with_dlpack() -> None:
    """Replace ``Tensor.__dlpack_device__``: torch 2.13's own looks for the name privateuse1."""
    method: Any = _dlpack_device
    torch.Tensor.__dlpack_device__ = method  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------- module.foo()

# The method gives way to children, parameters and buffers of that name. torch could generate it,
# too, but as a function of the class. That would hide members of a module, which only
# ``Module.__getattr__`` finds, and torch rejects members named like an existing attribute.


NAME = "foo"


def foo(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    """Move all parameters and buffers to foo, by default to the current device."""
    return self._apply(lambda tensor: tensor.foo(device))


def _is_method(value: Any) -> bool:
    return getattr(value, "__func__", None) is foo


def _is_called_by_torch() -> bool:
    """Whether the caller's caller is a function of torch."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] == "torch"


class _Method:
    """The method, which gives way to any member of that name.

    torch's own code does not see the method. It never calls it, but checks in dozens of places
    whether a module has a name: to register a member, or to copy one into the graph of a model.
    """

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Any:
        if module is None:
            return foo
        try:
            member = owner.__getattr__(module, NAME)  # type: ignore[attr-defined]
        except AttributeError:
            if _is_called_by_torch():
                raise
            return types.MethodType(foo, module)
        # A module that forwards lookups to another one would find the other's method.
        return types.MethodType(foo, module) if _is_method(member) else member


_names_of = torch.nn.Module.__dir__


def _dir(self: torch.nn.Module) -> list[str]:
    """List the names of a module; for torch, without the method."""
    names = _names_of(self)
    if _is_called_by_torch() and _is_method(getattr(self, NAME)):
        names.remove(NAME)
    return names


def install_module_method() -> None:
    setattr(torch.nn.Module, NAME, _Method())
    torch.nn.Module.__dir__ = _dir  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------- the profiler

# Its events have foo's names, like those of CUDA: ``self_foo_time_total``. For ``device`` in a
# table's ``sort_by``, torch accepts ``cuda``, ``xpu`` and ``privateuse1``; its column titles have
# the present device's name.


NAMES = (
    "device_memory_usage",
    "device_time",
    "device_time_str",
    "device_time_total",
    "device_time_total_str",
    "self_device_memory_usage",
    "self_device_time_total",
    "self_device_time_total_str",
)
STACKS_METRIC = "self_foo_time_total"

_metrics_of_torch = profiler_util.EventList.supported_export_stacks_metrics


def _metrics(self: profiler_util.EventList) -> list[str]:
    return [*_metrics_of_torch(self), STACKS_METRIC]


def _property(name: str) -> Any:
    return property(lambda event: getattr(event, name), doc=f"The same as ``{name}``.")


def register_with_profiler() -> None:
    for event in (profiler_util.FunctionEvent, profiler_util.FunctionEventAvg):
        for name in NAMES:
            setattr(event, name.replace("device", "foo"), _property(name))
    profiler_util.EventList.supported_export_stacks_metrics = _metrics  # type: ignore[method-assign]


# ---------------------------------------------------------------------------- torch.multiprocessing

# Processes share memory of foo, as on the CPU. When a storage is first sent, its bytes move into a
# CPU storage in shared memory, its host storage. The receiver maps that, and both processes see
# each other's writes.


_Storage = torch.UntypedStorage

# Weak references: to host storages by address, and to storages of foo by address and device index.
_host_storages = reductions.SharedCache()
_foo_storages = reductions.SharedCache()
_lock = threading.Lock()


def register_with_multiprocessing() -> None:
    reduction.register(_Storage, _reduce)


def _reduce(storage: _Storage) -> tuple[Any, ...]:
    if storage.device.type != "foo":
        return reductions.reduce_storage(storage)
    # init() raises in a forked child, which must not wait for a lock held during the fork.
    foo_devices.init()
    with _lock:
        return _rebuild, (_host_storage(storage), storage.device.index)


def _rebuild(host: _Storage, index: int) -> _Storage:
    foo_devices.init()
    with _lock:
        storage = _known(_foo_storages, (host.data_ptr(), index))
        # It may have been resized since, and moved.
        if storage is None or storage.data_ptr() != host.data_ptr():
            storage = _Storage(0, device=f"foo:{index}")
            _place_in(storage, host)
        return storage


def _host_storage(storage: _Storage) -> _Storage:
    host = _known(_host_storages, storage.data_ptr())
    if host is None:
        host = _Storage._new_shared(storage.nbytes()) if storage.nbytes() > 0 else _Storage(0)
        host.copy_(storage)
        _place_in(storage, host)
    return host


def _place_in(storage: _Storage, host: _Storage) -> None:
    _C.place_in(storage, host)
    # Empty storages have no address to find them by.
    if host.nbytes() > 0:
        _host_storages[host.data_ptr()] = reductions.StorageWeakRef(host)
        key = (host.data_ptr(), storage.device.index)
        _foo_storages[key] = reductions.StorageWeakRef(storage)


def _known(storages: reductions.SharedCache, key: Any) -> _Storage | None:
    reference = storages.get(key)
    return None if reference is None else _Storage._new_with_weak_ptr(reference.cdata)


# ------------------------------------------------------------------------------------- registration


# Typed storages count whole elements, so there are none for dtypes below a byte.
SMALLER_THAN_A_BYTE = [torch.quint4x2, torch.quint2x4]


def register(module: types.ModuleType) -> None:
    torch.utils.rename_privateuse1_backend("foo")
    torch.utils.generate_methods_for_privateuse1_backend(
        for_module=False, for_storage=True, unsupported_dtype=SMALLER_THAN_A_BYTE
    )
    install_module_method()
    register_device_module("foo", module)
    register_with_dlpack()
    register_with_multiprocessing()
    register_with_data_parallel()
    register_with_profiler()
    # At shutdown Python ends threads that request the GIL, and C++ aborts the process if that
    # happens in a destructor: with a backward pass just before the end that happened 1 time in 14.
    atexit.register(_C.wait_for_autograd_threads)
    # A build of torch may lack the first. torch imports the others at the first use of
    # torch.compile, which takes seconds. None has an entry point for devices to register earlier.
    after_import("torch.distributed.distributed_c10d", _register_with_distributed)
    after_import(FAKE_IMPLS, _register_with_fake_tensors)
    after_import(DYNAMO, _register_with_dynamo)
    after_import(INDUCTOR, _register_with_inductor)


def _register_with_distributed() -> None:
    """Let gloo use the memory of foo, without copies."""
    from torch.distributed.distributed_c10d import Backend

    Backend.default_device_backend_map["foo"] = Backend.GLOO
    # The fake backend computes nothing; torch's own tests run whole programs with it.
    for backend in (Backend.GLOO, Backend.FAKE):
        Backend.backend_capability[backend].append("foo")


def _register_with_fake_tensors() -> None:
    from foo_ops.device import _fake

    _fake.register()


def _register_with_dynamo() -> None:
    from foo_ops.device import _dynamo

    _dynamo.register()


def _register_with_inductor() -> None:
    from foo_ops.device import _inductor

    _inductor.register()
