"""Inductor for foo: its C++ kernels run on memory of foo."""

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops.compat import (
    BaseSchedulerNode,
    CppScheduling,
    CppWrapperCpu,
    CpuDeviceOpOverrides,
    CustomGraphModulePass,
    PythonWrapperCodegen,
    SubgraphPythonWrapperCodegen,
    V,
    codecache,
    get_cpp_wrapper_header,
    get_hash_for_files,
    inductor_decompositions,
    register_backend_for_device,
    register_decomposition,
    register_device_op_overrides,
)

# ---------------------------------------------------------------------------------------- attention

# Decomposes torch's attention on foo into operators of foo_ops in graphs that Inductor compiles.
#
# Under torch's own name, the operator returns numbers besides tensors, which generated C++ cannot
# receive from an operator that it only knows by its schema.


aten = torch.ops.aten


def _in_order_of(query: Tensor, result: Tensor) -> Tensor:
    """Give the result the query's memory order of dimensions, which torch promises."""
    order = sorted(range(4), key=query.stride, reverse=True)
    inverse = sorted(range(4), key=order.__getitem__)
    return result.permute(order).contiguous().permute(inverse)


def _seed_argument(seed: Tensor, dropout_p: float) -> Tensor | None:
    return seed.view(1) if dropout_p > 0 else None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if query.device.type != "foo":
        return NotImplemented
    seed = query.new_empty((), dtype=torch.int64)
    if dropout_p > 0:
        seed = torch.randint(torch.iinfo(torch.int64).max, (), device=query.device)
    output, logsumexp = torch.ops.foo.attention_seeded(
        query, key, value, attn_bias, seed=_seed_argument(seed, dropout_p),
        is_causal=is_causal, scale=scale, dropout_p=dropout_p,
    )  # fmt: skip
    lengths = query.shape[2], key.shape[2]
    offset = torch.empty_like(seed)
    return _in_order_of(query, output), logsumexp, None, None, *lengths, seed, offset, None


def _attention_backward(
    grad_output: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    grad_input_mask: list[bool],
    output: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    if query.device.type != "foo":
        return NotImplemented
    if grad_output is None:
        return None, None, None, None
    grad_query, grad_key, grad_value, grad_bias, _, _ = torch.ops.foo.attention_backward(
        grad_output, torch.zeros_like(logsumexp), query, key, value, attn_bias, None, None,
        output, logsumexp, _seed_argument(philox_seed, dropout_p),
        attn_bias_requires_grad=grad_input_mask[3],
        is_causal=is_causal, scale=scale, dropout_p=dropout_p,
    )  # fmt: skip
    return (
        _in_order_of(query, grad_query),
        _in_order_of(key, grad_key),
        _in_order_of(value, grad_value),
        grad_bias if grad_input_mask[3] else None,
    )


def register_attention() -> None:
    for name, formula in (
        ("_scaled_dot_product_fused_attention_overrideable", _attention),
        ("_scaled_dot_product_fused_attention_overrideable_backward", _attention_backward),
    ):
        register_decomposition(getattr(aten, name).default)(formula)


# ----------------------------------------------------------------------------------------- products

# Decomposes products with another result dtype, ``torch.mm(..., out_dtype=torch.float32)``, into
# products of wider matrices: Inductor supports the former only for CUDA.


# Without baddbmm: its fake kernel for .dtype fails in PyTorch 2.13, on every device.
NAMES = ("mm", "bmm", "addmm")


def _widened(name: str, of_torch: Callable[..., Any] | None) -> Callable[..., Any]:
    function: Callable[..., Tensor] = getattr(torch, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        if tensors[0].device.type != "foo":
            return of_torch(*args, **kwargs) if of_torch else NotImplemented
        dtype, *factors = args[len(tensors) :]
        factors_by_name = dict(zip(("beta", "alpha"), factors))
        return function(*(each.to(dtype) for each in tensors), **factors_by_name, **kwargs)

    return call


def register_products() -> None:
    for name in NAMES:
        operator = getattr(torch.ops.aten, name).dtype
        inductor_decompositions[operator] = _widened(name, inductor_decompositions.get(operator))


# ------------------------------------------------------------------------------------------ backend

# Memory of foo is host memory, so the CPU's kernels run on its tensors directly. Imported together
# with inductor.


def _on_cpu() -> AbstractContextManager[None]:
    """Generate and call kernels for the CPU in this context."""
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
    def make_allocation(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        shape: Sequence[Any],
        stride: Sequence[Any],
        allocation_shape: Sequence[Any] | None = None,
        is_pinned: bool = False,
    ) -> str:
        """Allocate on the device's index; torch writes none, and selects devices that it knows."""
        wrapper: Any = super()
        if device.type != "foo":
            return wrapper.make_allocation(
                name, device, dtype, shape, stride, allocation_shape, is_pinned
            )
        in_code = wrapper.codegen_python_shape_tuple
        sizes, strides = in_code(shape), in_code(stride)
        allocated = sizes if allocation_shape is None else in_code(allocation_shape)
        code = f"{name} = empty_strided({allocated}, {strides}, device='{device}', dtype={dtype})"
        return code if allocated == sizes else f"{code}.as_strided({sizes}, {strides})"


class _NotesTypesOfKernels:
    """Notes the C++ types of each kernel's arguments."""

    types_of_kernels: dict[str, list[str]]

    def define_kernel(self, kernel_name: str, kernel_body: str, *args: Any, **options: Any) -> None:
        wrapper: Any = super()
        wrapper.define_kernel(kernel_name, kernel_body, *args, **options)
        types = re.search(r"async_compile\.cpp_pybinding\((\[.*?\])", kernel_body)
        if types is not None:
            self.types_of_kernels[kernel_name] = ast.literal_eval(types[1])


class FooWrapper(_NewTensorsOnTheirDevice, _NotesTypesOfKernels, PythonWrapperCodegen):
    """Generates the code around the kernels of a graph."""

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
    """Generates the code of a branch or of a loop's body."""

    def __init__(self, name: str, parent: Any, partition_signatures: Any = None) -> None:
        super().__init__(name, parent, partition_signatures)
        self.types_of_kernels = parent.types_of_kernels


class FooCppWrapper(CppWrapperCpu):
    """Generates the CPU's C++ wrapper, which runs as one call on memory of foo."""

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
        # torch checks here that constants are on the device of the graph.
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

    ``devices`` has a letter for each result that is a tensor: f for foo, c for the CPU.
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
    """Treat foo like the CPU, without features for GPUs, such as other loop orders."""
    device = self.get_device()
    return _is_on_cpu(self) or (device is not None and device.type == "foo")


def _header_of_kernels(device: str, aot_mode: bool = False) -> str:
    """Return the CPU's precompiled header for foo; torch has one for each of its own devices."""
    return get_cpp_wrapper_header("cpu" if torch.device(device).type == "foo" else device, aot_mode)


class _Version(CustomGraphModulePass):
    """Changes no graph; its hash makes torch recompile cached graphs when this file changes."""

    def __call__(self, graph: torch.fx.GraphModule) -> None:
        pass

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, __file__, __file__))


def register() -> None:
    register_attention()
    register_products()
    setattr(codecache, get_cpp_wrapper_header.__name__, _header_of_kernels)
    register_backend_for_device("foo", FooScheduling, FooWrapper, FooCppWrapper, None, _Version())
    register_device_op_overrides("foo", CpuDeviceOpOverrides())
    method: Any = _is_cpu
    BaseSchedulerNode.is_cpu = method
