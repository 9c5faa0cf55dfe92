"""Pinned host memory is recognised by its tensors, cached when freed, and used to load data."""

import ctypes
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset


def test_pinned_tensors_are_on_the_cpu():
    tensor = torch.arange(10.0).pin_memory()
    assert tensor.is_pinned()
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == list(range(10))
    assert not torch.arange(10.0).is_pinned()
    assert not torch.arange(10.0, device="foo").is_pinned()


def test_views_and_storages_are_pinned():
    tensor = torch.zeros(100, pin_memory=True)
    assert tensor[7:9].is_pinned()
    assert tensor.view(10, 10).t().is_pinned()
    assert tensor.untyped_storage().is_pinned()


def test_where_pinned_memory_begins_and_ends():
    def is_pinned_at(address):
        byte = (ctypes.c_char * 1).from_address(address)
        return torch.frombuffer(byte, dtype=torch.uint8).is_pinned()

    # A power of two is not rounded up.
    tensor = torch.zeros(1 << 16, dtype=torch.uint8).pin_memory()
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    assert [is_pinned_at(address) for address in (begin, end - 1)] == [True, True]
    assert [is_pinned_at(address) for address in (begin - 1, end)] == [False, False]


def test_pinning_twice_copies_once():
    tensor = torch.ones(3).pin_memory()
    assert tensor.pin_memory() is tensor


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,)])
def test_shapes(shape):
    tensor = torch.ones(shape).pin_memory()
    assert tensor.shape == shape
    assert torch.equal(tensor, torch.ones(shape))


def test_freed_blocks_are_used_again():
    tensor = torch.empty(100_000, pin_memory=True)
    address = tensor.data_ptr()
    del tensor
    assert torch.empty(100_000, pin_memory=True).data_ptr() == address


def test_emptied_cache_leaves_what_is_in_use():
    tensor = torch.arange(50_000).pin_memory()
    torch.empty(200_000, pin_memory=True)
    torch.accelerator.memory.empty_host_cache()
    assert tensor.is_pinned()
    assert torch.equal(tensor, torch.arange(50_000))


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies(non_blocking):
    host = torch.arange(1000.0).pin_memory()
    there = host.to("foo:1", non_blocking=non_blocking)
    assert torch.equal(there.cpu(), host)
    back = torch.zeros(1000, pin_memory=True)
    back.copy_(there * 2, non_blocking=non_blocking)
    torch.foo.synchronize(1)
    assert torch.equal(back, host * 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers):
    dataset = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12))
    loader = DataLoader(dataset, batch_size=4, pin_memory=True, num_workers=workers)
    seen = []
    for inputs, targets in loader:
        assert inputs.is_pinned()
        assert targets.is_pinned()
        seen += inputs.to("foo", non_blocking=True)[:, 0].tolist()
    assert seen == list(range(0, 24, 2))


def test_threads():
    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        kept = []
        for size in torch.randint(1, 5000, (200,), generator=generator).tolist():
            kept.append((seed, size, torch.full((size,), seed * size).pin_memory()))
            if len(kept) > 10:
                kept.pop(size % 10)
        for seed, size, tensor in kept:
            failures.extend([] if (tensor == seed * size).all() else [size])

    failures = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_device_memory_cannot_be_pinned():
    for function in (
        lambda: torch.ones(2, device="foo").pin_memory(),
        lambda: torch.empty(2, device="foo", pin_memory=True),
    ):
        with pytest.raises(RuntimeError, match="dense CPU tensors can be pinned"):
            function()


def test_figures():
    torch.foo.init()
    torch.accelerator.memory.empty_host_cache()
    first = torch.foo.host_memory_stats()

    def change(name):
        return torch.foo.host_memory_stats()[name] - first[name]

    tensor = torch.empty(3000, dtype=torch.uint8, pin_memory=True)
    # The cache rounds up to a power of two.
    assert (change("active_requests.current"), change("active_bytes.current")) == (1, 4096)
    assert (change("allocations.current"), change("allocated_bytes.current")) == (1, 4096)
    del tensor
    assert (change("active_requests.current"), change("active_bytes.current")) == (0, 0)
    assert (change("allocations.current"), change("num_host_free")) == (1, 0)
    torch.accelerator.memory.empty_host_cache()
    assert (change("allocations.current"), change("allocated_bytes.current")) == (0, 0)
    assert (change("num_host_alloc"), change("num_host_free")) == (1, 1)
    assert (change("allocated_bytes.allocated"), change("allocated_bytes.freed")) == (4096, 4096)


def test_resets_of_figures():
    tensor = torch.empty(3000, dtype=torch.uint8, pin_memory=True)
    more = torch.empty(3000, dtype=torch.uint8, pin_memory=True)
    del more
    torch.foo.reset_peak_host_memory_stats()
    torch.foo.reset_accumulated_host_memory_stats()
    stats = torch.foo.host_memory_stats_as_nested_dict()
    for name in ("allocations", "allocated_bytes", "active_requests", "active_bytes"):
        figure = stats[name]
        assert figure["peak"] == figure["current"] > 0
        assert figure["allocated"] == figure["freed"] == 0
    assert stats["active_bytes"]["current"] >= tensor.nbytes
    assert stats["num_host_alloc"] == 0
