"""Memory of device foo: alignment, exact figures per device, out of memory, growth."""

import gc
import subprocess
import sys
import threading

import pytest
import torch

GRANULE = 64


@pytest.fixture(autouse=True)
def no_garbage():
    gc.collect()


@pytest.mark.parametrize("numbers", [1, 3, 17, 1000, 100_001])
def test_memory_is_aligned(numbers):
    assert torch.empty(numbers, device="foo").data_ptr() % GRANULE == 0


def test_empty_tensor_has_no_memory():
    before = torch.foo.memory_allocated()
    tensor = torch.empty(0, device="foo")
    assert tensor.data_ptr() == 0
    assert torch.foo.memory_allocated() == before


@pytest.mark.parametrize("index", [0, 1])
def test_figures_follow_one_tensor(index):
    other = 1 - index
    before, before_other = (torch.foo.memory_allocated(device) for device in (index, other))
    tensor = torch.empty(1000, device=f"foo:{index}")
    rounded = (1000 * 4 + GRANULE - 1) // GRANULE * GRANULE
    assert torch.foo.memory_allocated(index) == before + rounded
    assert torch.foo.memory_allocated(other) == before_other
    del tensor
    assert torch.foo.memory_allocated(index) == before


def test_figures_count_results_of_the_fallback():
    tensor = torch.ones(5, 1000, device="foo")
    before = torch.foo.memory_allocated()
    # The kernel for the CPU allocates this result, which becomes foo memory.
    indices = tensor.nonzero()
    assert torch.foo.memory_allocated() - before == 5000 * 2 * 8
    del indices
    assert torch.foo.memory_allocated() == before


def test_views_and_in_place_operators_allocate_nothing():
    tensor = torch.rand(64, 64, device="foo")
    allocations = torch.foo.memory_stats()["num_device_alloc"]
    tensor.t()[1:].mul_(2).add_(1)
    tensor.view(-1)[5:].unfold(0, 4, 2).zero_()
    assert torch.foo.memory_stats()["num_device_alloc"] == allocations


def test_peak_and_its_reset():
    torch.foo.reset_peak_memory_stats()
    base = torch.foo.memory_allocated()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="foo")
    del tensor
    assert torch.foo.max_memory_allocated() == base + (1 << 20)
    torch.foo.reset_peak_memory_stats()
    assert torch.foo.max_memory_allocated() == base


def test_accumulated_figures_and_their_reset():
    torch.foo.reset_accumulated_memory_stats(1)
    for _ in range(3):
        torch.empty(GRANULE, dtype=torch.uint8, device="foo:1")
    stats = torch.foo.memory_stats(1)
    assert stats["allocated_bytes.all.allocated"] == 3 * GRANULE
    assert stats["allocated_bytes.all.freed"] == 3 * GRANULE
    assert stats["num_device_alloc"] == stats["num_device_free"] == 3


def test_accelerator_reports_the_same_figures():
    tensor = torch.empty(12345, device="foo:1")
    assert torch.accelerator.memory_allocated(1) == torch.foo.memory_allocated(1)
    assert torch.accelerator.memory_reserved(1) == torch.foo.memory_reserved(1)
    assert torch.foo.memory_reserved(1) >= tensor.nbytes
    free, total = torch.foo.mem_get_info()
    assert 0 < free < total


def test_out_of_memory_leaves_the_process_usable():
    before = torch.foo.memory_allocated(1)
    retries = torch.foo.memory_stats(1)["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(1 << 60, dtype=torch.uint8, device="foo:1")
    assert str(error.value).splitlines()[0] == (
        f"foo out of memory: cannot allocate {1 << 60} bytes on device foo:1"
        f" beside the {before} bytes allocated there"
    )
    assert torch.foo.memory_stats(1)["num_ooms"] == retries + 1
    assert torch.foo.memory_allocated(1) == before
    assert torch.ones(3, device="foo:1").sum().item() == 3


def test_figures_are_exact_after_threads():
    before = [torch.foo.memory_allocated(index) for index in range(2)]

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        kept = []
        for size in torch.randint(1, 5000, (300,), generator=generator).tolist():
            kept.append(torch.ones(size, device=f"foo:{size % 2}") + 1)
            if len(kept) > 10:
                kept.pop(size % 10)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.foo.memory_allocated(index) for index in range(2)] == before


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
    subprocess.run([sys.executable, "-c", program], check=True)
