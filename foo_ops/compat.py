"""Private names of torch: no other module has one, so this page is compared with a new version.

An entry has torch's name without the underscore, or a plainer one. Entries are known for torch 2.13
to 2.15, with which they were run (docs/install.md). Where the line ends in (2.13), the entry is
newer than the runs with later versions.

Names that ``import torch`` has loaded are aliases. Others are in the table `LATER`, and are loaded
when they are first imported from here.

Attributes of objects stay where they are used, such as ``operator._schema``, ``storage._cdata`` and
``module._parameters``, and so do methods that subclasses override: nothing is imported for them.
Operators such as ``torch.ops.aten._to_copy`` do, too: their schemas are compatible.
"""

import pkgutil
from typing import Any

import torch
import torch.utils._mode_utils
import torch.utils._python_dispatch
import torch.utils._pytree

# ---------------------------------------------------------------------------- operators and schemas

OpOverload = torch._ops.OpOverload  # torch.ops.aten.add.Tensor
OpOverloadPacket = torch._ops.OpOverloadPacket  # torch.ops.aten.add
OpNamespace = torch._ops._OpNamespace  # torch.ops.aten (2.13)
HigherOrderOperator = torch._ops.HigherOrderOperator  # an operator that takes functions
FunctionSchema = torch._C.FunctionSchema  # operator._schema
Argument = torch._C.Argument  # one argument of a schema
OptionalType = torch._C.OptionalType  # the type of `Tensor?`
SafeKernelFunction = torch._C._SafeKernelFunction  # torch.library.get_kernel returns it (2.13)
fake_kernels = torch._library.simple_registry.singleton  # fake kernels, by operator (2.13)
find_schema = torch._C._dispatch_find_schema_or_throw  # the dispatcher's handle of an operator
set_report_error_callback = torch._C._dispatch_set_report_error_callback  # if a kernel is missing

# ------------------------------------------------------------------ dispatch keys and their kernels

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
after_autograd_keyset = torch._C._after_autograd_keyset  # the keys below Autograd
keyset_full_after = torch._C._dispatch_keyset_full_after  # the keys below any key
key_for_device = torch._C._dispatch_key_for_device  # "foo" -> "PrivateUse1"
included_keys = torch._C._dispatch_tls_local_include_set  # of this thread
excluded_keys = torch._C._dispatch_tls_local_exclude_set
ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard  # sets both
ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard
AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
has_kernel = torch._C._dispatch_has_kernel  # for any key
has_kernel_for_key = torch._C._dispatch_has_kernel_for_dispatch_key  # registered for it
has_computed_kernel_for_key = torch._C._dispatch_has_computed_kernel_for_dispatch_key  # or falls to

# ---------------------------------------------------------------------------- autograd and autocast

any_requires_grad = torch._C._any_requires_grad
get_autograd_fallback_mode = torch._C._get_autograd_fallback_mode  # operators without a formula
set_autograd_fallback_mode = torch._C._set_autograd_fallback_mode
saved_tensors_hooks_are_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
is_autocast_available = torch._C._is_autocast_available  # for a type of device
DisableAutocast = torch._C._DisableAutocast

# ---------------------------------------------------------------------- modes and tensor subclasses

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
TorchDispatchModeKey = torch._C._TorchDispatchModeKey  # of torch's own modes (2.13)
get_dispatch_mode = torch._C._get_dispatch_mode  # the active mode with such a key (2.13)
DisableTorchDispatch = torch._C._DisableTorchDispatch  # (2.13)
disable_current_modes = torch.utils._python_dispatch._disable_current_modes  # (2.13)
no_dispatch = torch.utils._mode_utils.no_dispatch  # neither modes nor subclasses
len_dispatch_stack = torch._C._len_torch_dispatch_stack  # the number of active modes
len_dispatch_stack_pre_dispatch = torch._ops._len_torch_dispatch_stack_pre_dispatch
len_function_stack = torch._C._len_torch_function_stack
disabled_torch_function = torch._C._disabled_torch_function_impl  # for a subclass without its own
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass  # a tensor without memory
pytree = torch.utils._pytree  # nested lists, tuples and dicts

# -------------------------------------------------------------------- tensors, storages and modules

LegacyStorage = torch.storage._LegacyStorage  # torch.FloatStorage and its kind
storage_use_count = torch._C._storage_Use_Count  # references to a storage's memory (2.13)
has_any_global_hook = torch.nn.modules.module._has_any_global_hook  # on all modules (2.13)

# ---------------------------------------------------------------------------------------- functorch

is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
is_batched_tensor = torch._C._functorch.is_batchedtensor
maybe_get_bdim = torch._C._functorch.maybe_get_bdim  # the batched dimension, -1 for others
maybe_get_level = torch._C._functorch.maybe_get_level  # the level of vmap or grad, -1 for others
get_unwrapped = torch._C._functorch.get_unwrapped
add_batch_dim = torch._C._functorch._add_batch_dim
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack  # the innermost (2.13)
set_vmap_fallback_warning_enabled = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
DisableFuncTorch = torch._C._DisableFuncTorch

# ------------------------------------------------------------------------------------------ devices

torch_c = torch._C  # a device's functions are registered in it
get_privateuse1_backend_name = torch._C._get_privateuse1_backend_name
register_device_module = torch._register_device_module  # as torch.foo
exchange_device = torch._C._accelerator_exchangeDevice
maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice  # -1: no change
DeviceType = torch._C._autograd.DeviceType  # the profiler's numbers of devices
AcceleratorGraph = torch._C._acceleratorGraph  # captures a stream
TorchCompileInductorWrapper = torch._TorchCompileInductorWrapper  # backend="inductor"

# ------------------------------------------------------ modules whose import registrations wait for

CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
DYNAMO = "torch._dynamo"
FAKE_IMPLS = "torch._subclasses.fake_impls"
INDUCTOR = "torch._inductor.compile_fx"

# ----------------------------------------------------------------------------------- imported later

_DYNAMO = "torch._dynamo"
_FAKE = "torch._subclasses.fake_tensor"
_INDUCTOR = "torch._inductor"
_SHARDING = "torch.distributed.tensor"
_TESTING = "torch.testing._internal"

LATER = {
    # Fake tensors and symbols.
    "FakeTensor": f"{_FAKE}:FakeTensor",
    "FakeTensorMode": f"{_FAKE}:FakeTensorMode",
    "FakeTensorConverter": f"{_FAKE}:FakeTensorConverter",  # makes fakes of graph inputs
    "is_fake": f"{_FAKE}:is_fake",  # also within wrappers (2.13)
    "in_kernel_invocation_manager": f"{_FAKE}:in_kernel_invocation_manager",  # fakes as on meta
    "DataDependentOutputException": f"{_FAKE}:DataDependentOutputException",  # errors of fakes
    "DynamicOutputShapeException": f"{_FAKE}:DynamicOutputShapeException",
    "UnsupportedOperatorException": f"{_FAKE}:UnsupportedOperatorException",
    "fake_impls": FAKE_IMPLS,  # fake kernels by operator
    "meta_registrations": "torch._meta_registrations",
    "FunctionalTensor": "torch._subclasses.functional_tensor:FunctionalTensor",  # (2.13)
    "NestedTensor": "torch.nested._internal.nested_tensor:NestedTensor",  # jagged (2.13)
    "symbols_config": "torch.fx.experimental._config",  # options of symbolic shapes
    # Decompositions of operators into others.
    "decomposition_table": "torch._decomp:decomposition_table",
    "broadcast_shapes": "torch._refs:_broadcast_shapes",
    "ELEMENTWISE_TYPE_PROMOTION_KIND": "torch._prims_common:ELEMENTWISE_TYPE_PROMOTION_KIND",
    "elementwise_dtypes": "torch._prims_common:elementwise_dtypes",
    "elementwise_output_strides": "torch._prims_common:compute_elementwise_output_strides",
    "is_contiguous_or_false": "torch._prims_common:is_contiguous_or_false",
    "make_contiguous_strides_for": "torch._prims_common:make_contiguous_strides_for",
    "LARGE_SPARSE_BLOCK_SIZE": "torch.nn.attention.flex_attention:_LARGE_SPARSE_BLOCK_SIZE",
    # functorch.
    "functorch_config": "torch._functorch.config",
    "current_functorch_interpreter": (
        "torch._functorch.pyfunctorch:retrieve_current_functorch_interpreter"
    ),
    # Dynamo.
    "dynamo_config": f"{_DYNAMO}.config",
    "register_backend": f"{_DYNAMO}.backends.registry:register_backend",
    "DeviceInterface": f"{_DYNAMO}.device_interface:DeviceInterface",
    "register_interface_for_device": f"{_DYNAMO}.device_interface:register_interface_for_device",
    "GenericDeviceVariable": f"{_DYNAMO}.variables.ctx_manager:GenericDeviceVariable",
    "register_device_context_manager": (
        f"{_DYNAMO}.variables.ctx_manager:register_device_context_manager"
    ),
    "DefaultsSource": f"{_DYNAMO}.source:DefaultsSource",  # a default of a function (2.13)
    "VariableTracker": f"{_DYNAMO}.variables.base:VariableTracker",  # a traced value (2.13)
    "ConstantVariable": f"{_DYNAMO}.variables:ConstantVariable",  # (2.13)
    "FunctionVariable": f"{_DYNAMO}.variables:TorchInGraphFunctionVariable",  # torch's own (2.13)
    "handlers_of_functions": (  # by function (2.13)
        f"{_DYNAMO}.variables.torch:TorchInGraphFunctionVariable._get_handlers"
    ),
    "FlexAttentionHigherOrderVariable": (
        f"{_DYNAMO}.variables.higher_order_ops:FlexAttentionHigherOrderVariable"
    ),
    "variables_of_higher_order_operators": (  # by name
        f"{_DYNAMO}.variables.higher_order_ops:_hop_name_to_variable_class"
    ),
    # Inductor.
    "inductor_config": f"{_INDUCTOR}.config",
    "codecache": f"{_INDUCTOR}.codecache",
    "get_cpp_wrapper_header": f"{_INDUCTOR}.codecache:_get_cpp_wrapper_header",
    "register_backend_for_device": f"{_INDUCTOR}.codegen.common:register_backend_for_device",
    "register_device_op_overrides": f"{_INDUCTOR}.codegen.common:register_device_op_overrides",
    "CppScheduling": f"{_INDUCTOR}.codegen.cpp:CppScheduling",
    "CppWrapperCpu": f"{_INDUCTOR}.codegen.cpp_wrapper_cpu:CppWrapperCpu",
    "CpuDeviceOpOverrides": f"{_INDUCTOR}.codegen.cpu_device_op_overrides:CpuDeviceOpOverrides",
    "PythonWrapperCodegen": f"{_INDUCTOR}.codegen.wrapper:PythonWrapperCodegen",
    "SubgraphPythonWrapperCodegen": f"{_INDUCTOR}.codegen.wrapper:SubgraphPythonWrapperCodegen",
    "CustomGraphModulePass": f"{_INDUCTOR}.custom_graph_pass:CustomGraphModulePass",
    "get_hash_for_files": f"{_INDUCTOR}.custom_graph_pass:get_hash_for_files",
    "inductor_decompositions": f"{_INDUCTOR}.decomposition:decompositions",  # (2.13)
    "register_decomposition": f"{_INDUCTOR}.decomposition:register_decomposition",
    "BaseSchedulerNode": f"{_INDUCTOR}.scheduler:BaseSchedulerNode",
    "V": f"{_INDUCTOR}.virtualized:V",  # V.graph is the graph that is being compiled
    # DTensor.
    "clear_sharding_cache": "torch._C:_clear_DTensor_sharding_propagator_cache",
    "sharding_propagator": f"{_SHARDING}:DTensor._op_dispatcher.sharding_propagator",
    "propagate_tensor_meta": (
        f"{_SHARDING}:DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta"
    ),
    "TensorMeta": f"{_SHARDING}._dtensor_spec:TensorMeta",  # shape, strides and dtype
    "OpSchema": f"{_SHARDING}._op_schema:OpSchema",  # a call
    "OpSpec": f"{_SHARDING}._op_schema:OpSpec",  # placements of its inputs and outputs
    "OpStrategy": f"{_SHARDING}._op_schema:OpStrategy",  # all that it can have
    "RuntimeSchemaInfo": f"{_SHARDING}._op_schema:RuntimeSchemaInfo",  # the key of its cache
    "expand_to_full_mesh_op_strategy": f"{_SHARDING}._ops.utils:expand_to_full_mesh_op_strategy",
    "is_tensor_evenly_shardable_on_dim": (
        f"{_SHARDING}._ops.utils:is_tensor_evenly_shardable_on_dim"
    ),
    "local_shape_and_global_offset": f"{_SHARDING}._utils:compute_local_shape_and_global_offset",
    "context_parallel": CONTEXT_PARALLEL,
    "context_parallel_options": f"{CONTEXT_PARALLEL}:_cp_options",
    "enable_context_parallel": f"{CONTEXT_PARALLEL}:_enable_context_parallel_dispatcher_impl",
    "disable_context_parallel": f"{CONTEXT_PARALLEL}:_disable_context_parallel_dispatcher_impl",
    # Tests of operators.
    "default_tolerances": "torch.testing._comparison:default_tolerances",
    "OpCheckError": f"{_TESTING}.optests:OpCheckError",
    "unique_overload": f"{_TESTING}.optests.generate_tests:resolve_unique_overload_or_throw",
    "SampleInput": f"{_TESTING}.opinfo.core:SampleInput",
    "common_cuda": f"{_TESTING}.common_cuda",  # (2.13)
    "module_db": f"{_TESTING}.common_modules:module_db",
    "op_db": f"{_TESTING}.common_methods_invocations:op_db",
    "optim_db": f"{_TESTING}.common_optimizers:optim_db",
}
"""Path of each entry as `pkgutil.resolve_name` takes it, module and colon and name."""


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = pkgutil.resolve_name(LATER[name])
    return found
