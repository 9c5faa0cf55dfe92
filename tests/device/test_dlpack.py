"""DLPack shares tensors of foo with others, and theirs with foo, over the same memory."""

import gc

import numpy as np
import pytest
import torch
from torch.utils.dlpack import DLDeviceType


def test_round_trip_shares_the_memory():
    tensor = torch.arange(6.0, device="foo:1").view(2, 3).t()
    assert tensor.__dlpack_device__() == (DLDeviceType.kDLExtDev, 1)
    twin = torch.from_dlpack(tensor)
    assert twin.device == tensor.device
    assert twin.stride() == tensor.stride()
    assert twin.data_ptr() == tensor.data_ptr()
    twin[0, 0] = 9
    assert tensor[0, 0].item() == 9


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.complex64])
def test_dtypes(dtype):
    tensor = torch.ones(3, device="foo").to(dtype)
    twin = torch.from_dlpack(tensor.__dlpack__(max_version=(1, 0)))
    assert twin.dtype == dtype
    assert torch.equal(twin, tensor)


def test_the_memory_lives_as_long_as_its_last_owner():
    # Garbage of other tests may keep more garbage alive, which only the next round finds.
    while gc.collect():
        pass
    before = torch.foo.memory_allocated()
    twin = torch.from_dlpack(torch.full((100,), 7, device="foo"))
    gc.collect()
    assert torch.foo.memory_allocated() > before
    assert twin.eq(7).all()
    capsule = twin.__dlpack__()
    del twin, capsule
    gc.collect()
    assert torch.foo.memory_allocated() == before


def test_to_and_from_the_cpu_is_a_copy():
    tensor = torch.ones(3, device="foo")
    host = torch.from_dlpack(tensor, device="cpu")
    assert host.tolist() == [1, 1, 1]
    assert host.data_ptr() != tensor.data_ptr()
    with pytest.raises(RuntimeError, match="Unsupported device in DLTensor"):
        np.from_dlpack(tensor)


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(BufferError, match="require gradient"):
        torch.ones(2, device="foo", requires_grad=True).__dlpack__()
    with pytest.raises(BufferError, match="conjugate bit"):
        torch.ones(2, device="foo", dtype=torch.complex64).conj().__dlpack__()


def test_other_devices_have_the_names_that_they_had():
    assert torch.ones(2).__dlpack_device__() == (DLDeviceType.kDLCPU, 0)
    with pytest.raises(ValueError, match="Unknown device type meta"):
        torch.ones(2, device="meta").__dlpack_device__()
