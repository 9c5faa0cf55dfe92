"""The import registers foo's name, module and methods with torch."""

import pytest
import torch

# Names of torch.cuda, and further names that torch looks up in a device's module.
NAMES = [
    *torch.cuda.__all__,
    "_is_in_bad_fork",
    "_lazy_init",
    "_initialized",
    "_utils",
    "get_amp_supported_dtype",
    "is_autocast_enabled",
    "set_autocast_enabled",
    "get_autocast_dtype",
    "set_autocast_dtype",
]
# Names of torch.cuda that foo lacks, by reason.
MISSING = {
    "FooGraph": "CUDAGraph",
    "exports of graphs, of PyTorch 2.15": "export_dot export_graph_data graph_annotations",
    "libraries of CUDA": "CudaError DeferredCudaCallError check_error cudaStatus cudart"
    " current_blas_handle current_solver_handle has_magma jiterator nccl nvtx profiler tunable",
    "sensors": "clock_rate list_gpu_processes memory_usage power_draw temperature utilization",
    "code for processors": "get_arch_list get_gencode_flags",
    "other allocators": "CUDAPluggableAllocator caching_allocator_disabled"
    " caching_allocator_enable",
    "streams of others": "ExternalStream GreenContext get_stream_from_external",
    "deprecated": "has_half sparse",
}


def test_names_of_cuda():
    missing = {name for name in NAMES if not hasattr(torch.foo, name)}
    # Some names exist only in newer versions.
    assert missing == set(" ".join(MISSING.values()).split()) & set(NAMES)


def test_public_names_exist():
    assert set(torch.foo.__all__) <= set(dir(torch.foo)) | {"_initialized"}
    with pytest.raises(AttributeError, match=r"^module 'torch.foo' has no attribute 'nothing'$"):
        torch.foo.nothing  # noqa: B018


def test_name():
    assert torch._C._get_privateuse1_backend_name() == "foo"
    assert torch.device("foo:1").type == "foo"
    torch.utils.rename_privateuse1_backend("foo")  # the same name changes nothing
    with pytest.raises(RuntimeError, match=r"already been set.*foo"):
        torch.utils.rename_privateuse1_backend("bar")


def test_registering_twice_is_refused():
    with pytest.raises(RuntimeError, match="has already been registered"):
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    with pytest.raises(RuntimeError, match="has already been registered"):
        torch._register_device_module("foo", torch.foo)


@pytest.mark.parametrize("device", [1, "foo:1", torch.device("foo", 1)])
def test_methods_take_a_device(device):
    tensor = torch.ones(3)
    assert tensor.foo(device).device == torch.device("foo:1")
    assert tensor.foo(device, non_blocking=True).tolist() == [1, 1, 1]
    assert tensor.untyped_storage().foo(torch.device(device)).device == torch.device("foo:1")
    assert torch.nn.Linear(1, 1).foo(device).bias.is_foo


def test_methods_refuse_other_devices():
    with pytest.raises(RuntimeError, match="Invalid device"):
        torch.ones(3).foo("cpu")
    with pytest.raises(RuntimeError, match="device index must be from 0 to 1, got 7"):
        torch.ones(3).foo(7)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_typed_storages():
    storage = torch.TypedStorage([1.0, 2.0], dtype=torch.float64)
    there = storage.foo(1)
    assert there.is_foo
    assert there.dtype == torch.float64
    assert there.tolist() == [1, 2]
    packed = torch.TypedStorage(2, dtype=torch.quint4x2)
    with pytest.raises(RuntimeError, match=r"torch.quint4x2 dtype is not supported by this"):
        packed.foo()


def test_packed_sequences():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    there = packed.foo()
    assert there.is_foo
    assert there.data.tolist() == packed.data.tolist()
    assert not packed.is_foo


def test_capability_is_the_version():
    major, minor = torch.foo.get_device_capability(1)
    assert [str(major), str(minor)] == __import__("foo_ops").__version__.split(".")[:2]
    with pytest.raises(RuntimeError, match="device index must be from 0 to 1, got 5"):
        torch.foo.get_device_capability(5)


def test_autocast_state():
    assert not torch.foo.is_autocast_enabled()
    assert torch.foo.get_amp_supported_dtype() == [torch.float16, torch.bfloat16]
    with torch.autocast("foo", dtype=torch.bfloat16):
        assert torch.foo.is_autocast_enabled()
        assert torch.foo.get_autocast_dtype() == torch.bfloat16
        torch.foo.set_autocast_enabled(False)
        assert (torch.ones(2, 2, device="foo") @ torch.ones(2, 2, device="foo")).dtype == (
            torch.float32
        )
        torch.foo.set_autocast_enabled(True)
        torch.foo.set_autocast_dtype(torch.float16)
        assert (torch.ones(2, 2, device="foo") @ torch.ones(2, 2, device="foo")).dtype == (
            torch.float16
        )
    assert not torch.foo.is_autocast_enabled()


def test_accelerator_functions():
    """Every function of torch.accelerator works."""
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("foo")
    assert accelerator.device_count() == 2
    with accelerator.device_index(1):
        assert accelerator.current_device_index() == 1
        tensor = torch.ones(1000, device="foo")
        assert accelerator.memory_allocated() == torch.foo.memory_allocated(1) > 0
        accelerator.reset_peak_memory_stats()
        assert accelerator.max_memory_allocated() == accelerator.memory_allocated()
        accelerator.reset_accumulated_memory_stats()
        assert accelerator.memory_stats()["allocated_bytes.all.allocated"] == 0
        assert accelerator.max_memory_reserved() >= accelerator.memory_reserved() > 0
        free, total = accelerator.get_memory_info()
        # The free memory changes from one moment to the next.
        assert 0 < free < total == torch.foo.mem_get_info(1)[1]
    assert accelerator.current_device_index() == 0
    assert tensor.get_device() == 1
    stream = torch.Stream(device="foo:0")
    before = accelerator.current_stream()
    accelerator.set_stream(stream)
    assert accelerator.current_stream() == stream
    accelerator.set_stream(before)
    accelerator.synchronize()
    accelerator.empty_cache()
