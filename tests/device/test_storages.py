"""Storages of foo grow on their own device, and may outlive the interpreter."""

import torch
from support.processes import python

GRANULE = 64


def test_storage_grows_on_its_own_device():
    tensor = torch.arange(4, dtype=torch.uint8, device="foo:1")
    storage = tensor.untyped_storage()
    before = torch.foo.memory_allocated(1)
    storage.resize_(1000)
    assert storage.device == torch.device("foo:1")
    assert tensor.tolist() == [0, 1, 2, 3]
    assert torch.foo.memory_allocated(1) - before == 1024 - GRANULE
    storage.resize_(0)
    assert torch.foo.memory_allocated(1) == before - GRANULE


def test_storages_may_outlive_the_interpreter():
    program = """
import torch
class Holder: pass
holder = Holder()
holder.self = holder
holder.tensors = [torch.ones(1000, device="foo") + 1, torch.rand(9, 9, device="foo:1").topk(2)]
torch.holder = holder
"""
    # A new interpreter: at the exit of a fork, garbage collection skips the objects it inherited.
    process = python(program, new=True)
    assert process.returncode == 0, process.stderr


def test_a_storage_without_memory_stays_on_its_device():
    """Sharded training frees the memory between two uses of a parameter."""
    tensor = torch.ones(100, device="foo:1")
    storage = tensor.untyped_storage()
    held = torch.foo.memory_allocated(1)
    storage.resize_(0)
    assert storage.device == tensor.device == torch.device("foo:1")
    assert torch.foo.memory_allocated(1) == held - 448
    storage.resize_(400)
    assert storage.device == torch.device("foo:1")
    assert torch.foo.memory_allocated(1) == held
    assert tensor.fill_(2).sum().item() == 200
