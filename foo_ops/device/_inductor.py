"""Compile graphs on foo by torch.compile's own backend: its C++ kernels, on memory of foo.

Foo memory is host memory, so that they run where the tensors lie. Imported together with inductor.
"""

import ast
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._inductor import codecache
from torch._inductor.codegen.common import register_backend_for_device, register_device_op_overrides
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.custom_graph_pass import CustomGraphModulePass, get_hash_for_files
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V

from foo_ops import _C
from foo_ops.device import _inductor_attention, _inductor_products


def _on_cpu() -> AbstractContextManager[None]:
    """Write and call kernels for the CPU while it lasts."""
    return V.graph.set_current_device(torch.device("cpu"))


class FooScheduling(CppScheduling):
    def codegen_node(self, node: Any) -> None:
        with _on_cpu():
            super().codegen_node(node)

    def codegen_template(self, *args: Any, **options: Any) -> Any:
        with _on_cpu():
            return super().codegen_template(*args, **options)

    def flush(self) -> None:
        with _on_cpu():
            super().flush()


class _NewTensorsOnTheirDevice:
    def make_allocation(self, name: str, device: torch.device, *args: Any, **options: Any) -> str:
        """torch writes the type of the device and sets its index before, on devices it knows."""
        wrapper: Any = super()
        code = wrapper.make_allocation(name, device, *args, **options)
        return code.replace("device='foo'", f"device='{device}'")


class _NotesTypesOfKernels:
    """Notes what the arguments of each kernel are in C++."""

    types_of_kernels: dict[str, list[str]]

    def define_kernel(self, kernel_name: str, kernel_body: str, *args: Any, **options: Any) -> None:
        wrapper: Any = super()
        wrapper.define_kernel(kernel_name, kernel_body, *args, **options)
        types = re.search(r"async_compile\.cpp_pybinding\((\[.*?\])", kernel_body)
        if types is not None:
            self.types_of_kernels[kernel_name] = ast.literal_eval(types[1])


class FooWrapper(_NewTensorsOnTheirDevice, _NotesTypesOfKernels, PythonWrapperCodegen):
    """Writes the code around the kernels of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.types_of_kernels = {}

    def generate_end(self, result: Any) -> None:
        super().generate_end(result)
        result.splice(
            f"""
            from foo_ops.device import _compiled_kernels
            _compiled_kernels.add(globals(), {self.types_of_kernels!r})
            """
        )

    @staticmethod
    def create(
        is_subgraph: bool,
        subgraph_name: str | None,
        parent_wrapper: PythonWrapperCodegen | None,
        partition_signatures: Any = None,
    ) -> PythonWrapperCodegen:
        if not is_subgraph:
            return FooWrapper()
        assert subgraph_name is not None
        assert parent_wrapper is not None
        return FooSubgraphWrapper(subgraph_name, parent_wrapper, partition_signatures)


class FooSubgraphWrapper(
    _NewTensorsOnTheirDevice, _NotesTypesOfKernels, SubgraphPythonWrapperCodegen
):
    """Writes the code of a branch or of the body of a loop."""

    def __init__(self, name: str, parent: Any, partition_signatures: Any = None) -> None:
        super().__init__(name, parent, partition_signatures)
        self.types_of_kernels = parent.types_of_kernels


class FooCppWrapper(CppWrapperCpu):
    """Writes the same code in C++: that of the CPU, which runs as one call over memory of foo."""

    @staticmethod
    def create(*args: Any, **options: Any) -> "FooCppWrapper":
        return FooCppWrapper()

    def add_device_include(self, device: str) -> None:
        super().add_device_include("cpu")

    def codegen_device(self, device: torch.device) -> str:
        return super().codegen_device(torch.device("cpu"))

    @staticmethod
    def get_c_shim_func_name(kernel: str, device: str) -> str:
        return CppWrapperCpu.get_c_shim_func_name(kernel, "cpu")

    def codegen_model_constructor(self) -> None:
        # torch checks there that constants are on the device of the graph.
        self.device = "foo"
        super().codegen_model_constructor()
        self.device = "cpu"

    def generate_end(self, result: Any) -> None:
        super().generate_end(result)
        tensors = (each for each in V.graph.graph_outputs if each.has_tensor_output())
        devices = "".join("f" if _is_foo(each) else "c" for each in tensors)
        if V.graph.aot_mode:
            result.writeline(
                f'extern "C" AOTI_API const char foo_devices_of_results[] = "{devices}";'
            )
        else:
            result.splice(
                f"""
                from foo_ops.device._inductor import as_host_call
                call = as_host_call(call, {_device_of_graph().index}, {devices!r})
                """
            )


def _is_foo(node: Any) -> bool:
    device = node.get_device()
    return device is not None and device.type == "foo"


def _device_of_graph() -> torch.device:
    indices = sorted(V.graph.device_idxs)
    if len(indices) > 1:
        names = " and ".join(f"foo:{index}" for index in indices)
        raise NotImplementedError(f"cpp_wrapper: a graph must be on one device of foo, got {names}")
    return torch.device("foo", *indices)


def as_host_call(graph: Callable[..., Any], index: int, devices: str) -> Callable[..., Any]:
    """Let a compiled graph take tensors of ``foo:index``.

    There is a letter in ``devices`` for each of its results that is a tensor and no number.
    """

    def call(inputs: list[Any]) -> list[Any]:
        tensors = [torch.as_tensor(each) for each in inputs]
        inputs.clear()
        results = []

        def run(host: list[torch.Tensor]) -> list[torch.Tensor]:
            results.extend(graph(host))
            return [each for each in results if isinstance(each, torch.Tensor)]

        device = torch.device("foo", index)
        on_foo = iter(_C.device.run_compiled_graph(device, run, tensors, devices))
        return [next(on_foo) if isinstance(each, torch.Tensor) else each for each in results]

    return call


_is_on_cpu = BaseSchedulerNode.is_cpu


def _is_cpu(self: BaseSchedulerNode) -> bool:
    """Switch off what exists for GPUs alone, such as other orders of loops."""
    device = self.get_device()
    return _is_on_cpu(self) or (device is not None and device.type == "foo")


_header = codecache._get_cpp_wrapper_header


def _header_of_kernels(device: str, aot_mode: bool = False) -> str:
    """Name the header that torch compiles in advance: it has one for each device of its own."""
    return _header("cpu" if torch.device(device).type == "foo" else device, aot_mode)


class _Version(CustomGraphModulePass):
    """Changes no graph. torch compiles anew what it keeps on disk when this code has changed."""

    def __call__(self, graph: torch.fx.GraphModule) -> None:
        pass

    def uuid(self) -> Any:
        return get_hash_for_files(
            (__file__, _inductor_attention.__file__, _inductor_products.__file__)
        )


def register() -> None:
    _inductor_attention.register()
    _inductor_products.register()
    codecache._get_cpp_wrapper_header = _header_of_kernels
    register_backend_for_device("foo", FooScheduling, FooWrapper, FooCppWrapper, None, _Version())
    register_device_op_overrides("foo", CpuDeviceOpOverrides())
    method: Any = _is_cpu
    BaseSchedulerNode.is_cpu = method  # type: ignore[method-assign]
