"""Registers device ``foo`` with torch.compile. Imported together with torch._dynamo."""

from collections.abc import Callable
from typing import Any

import torch

from foo_ops.compat import (
    DeviceInterface,
    GenericDeviceVariable,
    TorchCompileInductorWrapper,
    register_backend,
    register_device_context_manager,
    register_interface_for_device,
)
from foo_ops.device import _utils, devices, memory, streams


class FooInterface(DeviceInterface):
    device = devices.device
    Event = streams.Event
    Stream = streams.Stream

    class Worker(DeviceInterface.Worker):
        set_device = staticmethod(devices.set_device)
        current_device = staticmethod(devices.current_device)
        get_device_properties = staticmethod(devices.get_device_properties)

    current_device = staticmethod(devices.current_device)
    set_device = staticmethod(devices.set_device)
    device_count = staticmethod(devices.device_count)
    is_available = staticmethod(devices.is_available)
    exchange_device = staticmethod(devices._exchange_device)
    maybe_exchange_device = staticmethod(devices._maybe_exchange_device)
    synchronize = staticmethod(devices.synchronize)
    get_device_properties = staticmethod(devices.get_device_properties)
    memory_allocated = staticmethod(memory.memory_allocated)
    stream = staticmethod(streams.stream)
    current_stream = staticmethod(streams.current_stream)
    set_stream = staticmethod(streams.set_stream)
    is_bf16_supported = staticmethod(devices.is_bf16_supported)

    @staticmethod
    def get_raw_stream(device_idx: int) -> int:
        return streams.current_stream(device_idx).stream_id

    @staticmethod
    def get_compute_capability(device: Any = None) -> str:
        return ""

    @staticmethod
    def is_triton_capable(device: Any = None) -> bool:
        return False


class FooDeviceVariable(GenericDeviceVariable):
    """Traces ``with torch.foo.device(...)`` in a compiled function."""

    _exchange_fn = staticmethod(devices._exchange_device)
    _maybe_exchange_fn = staticmethod(devices._maybe_exchange_device)
    _get_device_index_fn = staticmethod(_utils._get_device_index)

    def module_name(self) -> str:
        return "torch.foo"

    def python_type(self) -> type:
        return devices.device


def compile_graph(
    graph: torch.fx.GraphModule,
    inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile for ``torch.compile(backend="foo")``: Inductor with its modes and options.

    Inductor uses the registrations of each tensor's device, so graphs on the CPU or on both devices
    are compiled, too.
    """
    compile_ = TorchCompileInductorWrapper(mode, options, dynamic=None)
    return compile_(graph, inputs)


def register() -> None:
    # Not as an entry point of torch_dynamo_backends, which serve packages that torch does not load.
    register_backend(compile_graph, name="foo")
    register_interface_for_device("foo", FooInterface)
    for index in range(devices.device_count()):
        register_interface_for_device(f"foo:{index}", FooInterface)
    register_device_context_manager(devices.device, FooDeviceVariable)
