"""Memory of device foo is aligned, counted exactly per device, limited, and grows."""

import gc
import itertools
import resource
import threading

import pytest
import torch
from support.processes import python

GRANULE = 64


@pytest.fixture(autouse=True)
def no_garbage(quick_collections):
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
    # The CPU's kernel allocates this result, which becomes foo memory.
    indices = tensor.nonzero()
    assert torch.foo.memory_allocated() - before == 5000 * 2 * 8
    del indices
    assert torch.foo.memory_allocated() == before


def test_views_and_in_place_operators_allocate_nothing():
    tensor = torch.rand(64, 64, device="foo")
    torch.foo.reset_peak_memory_stats()
    before = torch.foo.memory_allocated()
    tensor.t()[1:].mul_(2).add_(1)
    tensor.view(-1)[5:].unfold(0, 4, 2).zero_()
    # The kernel makes a tensor of a number while it runs.
    assert torch.foo.max_memory_allocated() - before <= GRANULE


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
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 3
    assert stats["allocation.small_pool.allocated"] == 3
    assert stats["allocation.large_pool.allocated"] == 0


def test_accelerator_reports_the_same_figures():
    tensor = torch.empty(12345, device="foo:1")
    assert torch.foo.device_memory_used(1) == torch.foo.memory_reserved(1)
    assert torch.accelerator.memory_allocated(1) == torch.foo.memory_allocated(1)
    assert torch.accelerator.memory_reserved(1) == torch.foo.memory_reserved(1)
    assert torch.foo.memory_reserved(1) >= tensor.nbytes
    free, total = torch.foo.mem_get_info()
    assert 0 < free < total


def test_nested_figures():
    tensor = torch.empty(12345, device="foo:1")
    nested, flat = torch.foo.memory_stats_as_nested_dict(1), torch.foo.memory_stats(1)
    assert nested["allocated_bytes"]["all"]["current"] == torch.foo.memory_allocated(1)
    assert nested["allocated_bytes"]["all"]["current"] >= tensor.nbytes
    assert nested["num_ooms"] == flat["num_ooms"]
    assert nested["allocation"]["small_pool"] == {
        each: flat[f"allocation.small_pool.{each}"]
        for each in ("current", "peak", "allocated", "freed")
    }


def test_out_of_memory_leaves_the_process_usable():
    before = torch.foo.memory_allocated(1)
    torch.foo.empty_cache()
    out_of_memory = torch.foo.memory_stats(1)["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError, match="foo out of memory") as error:
        torch.empty(1 << 60, dtype=torch.uint8, device="foo:1")
    assert "Tried to allocate 1073741824.00 GiB. Device foo:1 has a total" in str(error.value)
    assert torch.foo.memory_stats(1)["num_ooms"] == out_of_memory + 1
    assert torch.foo.memory_allocated(1) == before
    assert torch.ones(3, device="foo:1").sum().item() == 3


LIMIT = """
import torch
MB = 1 << 20
def bytes_of(count): return torch.empty(count, dtype=torch.uint8, device="foo")
def check(error, *parts):
    for part in parts:
        assert part in str(error), error
"""


def run_with_limit(program, limit="64M"):
    return python(LIMIT + program, FOO_MEMORY_LIMIT=limit)


def check_with_limit(program, limit="64M"):
    process = run_with_limit(program, limit)
    assert process.returncode == 0, process.stderr


def test_limit():
    check_with_limit("""
assert torch.foo.mem_get_info() == (64 * MB, 64 * MB)
assert torch.foo.get_device_properties().total_memory == 64 * MB
kept = bytes_of(30 * MB - 64)
assert torch.foo.mem_get_info() == (34 * MB, 64 * MB)
try:
    bytes_of(40 * MB)
except torch.OutOfMemoryError as error:
    check(error, "foo out of memory. Tried to allocate 40.00 MiB. Device foo:0 has a total "
          "capacity of 64.00 MiB of which 34.00 MiB is free. 30.00 MiB is allocated, and "
          "64 bytes is reserved but not allocated.")
else:
    raise AssertionError
other = bytes_of(34 * MB - 64)
assert torch.foo.memory_reserved() == 64 * MB
assert torch.foo.memory_allocated() == 64 * MB - 128
# The other device has memory of its own.
assert torch.foo.memory_reserved(1) == 0
torch.ones(MB, device="foo:1")
""")


def test_cache_is_emptied_before_giving_up():
    check_with_limit("""
for _ in range(3):
    bytes_of(40 * MB)
assert torch.foo.memory_reserved() >= 40 * MB
assert torch.foo.memory_stats()["num_alloc_retries"] == 0
kept = bytes_of(50 * MB)
assert torch.foo.memory_stats()["num_alloc_retries"] == 1
assert torch.foo.memory_stats()["num_ooms"] == 0
assert torch.foo.memory_reserved() == 52 * MB
""")


def test_fraction():
    check_with_limit("""
torch.foo.set_per_process_memory_fraction(0.5)
assert torch.foo.get_per_process_memory_fraction() == 0.5
assert torch.foo.get_per_process_memory_fraction(1) == 1
try:
    bytes_of(40 * MB)
except torch.OutOfMemoryError as error:
    check(error, "This process may use 32.00 MiB.", "32.00 MiB is free")
else:
    raise AssertionError
bytes_of(30 * MB)
torch.foo.set_per_process_memory_fraction(1.0)
bytes_of(40 * MB)
for fraction, kind in ((1.5, ValueError), (-0.1, ValueError), (1, TypeError)):
    try:
        torch.foo.set_per_process_memory_fraction(fraction)
    except kind as error:
        check(error, "fraction must be")
    else:
        raise AssertionError(fraction)
""")


@pytest.mark.parametrize("limit", ["", "many", "-5", "1T", "2 G", "9" * 30, f"{1 << 62}K"])
def test_limit_must_be_a_number_of_bytes(limit):
    process = run_with_limit("torch.ones(1, device='foo')", limit)
    assert process.returncode != 0
    expected = "FOO_MEMORY_LIMIT must be a number of bytes, such as 1000000, 512M or 2G, got "
    assert expected + repr(limit) in process.stderr


def test_out_of_memory_in_a_backward_pass():
    check_with_limit("""
def forward():
    weight = torch.linspace(0, 1, 2 * MB, device="foo", requires_grad=True)
    return weight, (weight.exp().exp() * weight).sum()

weight, loss = forward()
loss.backward()
expected = weight.grad.cpu()
del weight, loss
assert torch.foo.memory_allocated() == 0

weight, loss = forward()
used = torch.foo.memory_allocated()
filler = bytes_of(64 * MB - torch.foo.memory_reserved() - 64)
fillers = [filler]
while True:
    try:
        fillers.append(bytes_of(5 * MB))
    except torch.OutOfMemoryError:
        break
try:
    loss.backward()
except torch.OutOfMemoryError as error:
    check(error, "foo out of memory")
else:
    raise AssertionError
assert weight.grad is None
del filler, fillers, weight, loss
assert torch.foo.memory_allocated() == 0

weight, loss = forward()
loss.backward()
assert torch.equal(weight.grad.cpu(), expected)
""")


def test_freed_memory_is_used_again():
    sizes = [100, 5000, 1 << 20, 3 << 20, 100 << 20]
    for size in sizes:
        tensor = torch.empty(size, dtype=torch.uint8, device="foo")
        address = tensor.data_ptr()
        del tensor
        segments = torch.foo.memory_stats()["num_device_alloc"]
        tensor = torch.empty(size, dtype=torch.uint8, device="foo")
        assert tensor.data_ptr() == address
        assert torch.foo.memory_stats()["num_device_alloc"] == segments
        del tensor


def test_blocks_split_and_merge():
    torch.foo.empty_cache()
    before = torch.foo.memory_stats(1).copy()
    # All fit in one segment of 20 MiB.
    blocks = [torch.empty(4 << 20, dtype=torch.uint8, device="foo:1") for _ in range(4)]
    addresses = sorted(block.data_ptr() for block in blocks)
    assert {later - first for first, later in itertools.pairwise(addresses)} == {(4 << 20) + 64}
    del blocks[1:3]
    whole = torch.empty(8 << 20, dtype=torch.uint8, device="foo:1")
    assert whole.data_ptr() == addresses[1]
    stats = torch.foo.memory_stats(1)
    assert stats["segment.large_pool.current"] == before["segment.large_pool.current"] + 1
    free = (20 << 20) - (16 << 20) - 5 * 64
    split = "inactive_split_bytes.large_pool.current"
    assert stats[split] - before[split] == free
    del whole, blocks
    assert torch.foo.memory_stats(1)[split] == before[split]
    torch.foo.empty_cache()
    assert torch.foo.memory_reserved(1) == before["reserved_bytes.all.current"]


def test_empty_cache_keeps_what_is_in_use():
    tensor = torch.arange(1 << 20, device="foo")
    torch.empty(30 << 20, dtype=torch.uint8, device="foo")
    torch.foo.empty_cache()
    assert tensor.sum().item() == (1 << 20) * ((1 << 20) - 1) // 2
    stats = torch.foo.memory_stats()
    assert stats["num_device_free"] > 0
    assert stats["segment.all.current"] == len(
        [each for each in torch.foo.memory_snapshot() if each["device"] == 0]
    )


def test_snapshot_adds_up():
    tensors = [torch.ones(size, device="foo:1") for size in (1, 100, 10_000, 1_000_000)]
    mine = [each for each in torch.foo.memory_snapshot() if each["device"] == 1]
    stats = torch.foo.memory_stats(1)
    assert sum(each["total_size"] for each in mine) == stats["reserved_bytes.all.current"]
    assert sum(each["allocated_size"] for each in mine) == stats["allocated_bytes.all.current"]
    assert sum(each["active_size"] for each in mine) == stats["active_bytes.all.current"]
    active = [
        block for each in mine for block in each["blocks"] if block["state"] == "active_allocated"
    ]
    assert len(active) == stats["allocation.all.current"]
    requested = {block["address"]: block["requested_size"] for block in active}
    for tensor in tensors:
        assert requested[tensor.data_ptr()] == tensor.nbytes
    for each in mine:
        assert sum(block["size"] + 64 for block in each["blocks"]) == each["total_size"]


def test_summary():
    tensor = torch.ones(1 << 20, device="foo:1")
    summary = torch.foo.memory_summary(1)
    assert summary.startswith("Memory of device foo:1\n")
    assert "large blocks" in summary
    assert "large blocks" not in torch.foo.memory_summary(1, abbreviated=True)
    (line,) = (line for line in summary.splitlines() if line.startswith("Reserved segments"))
    current = torch.foo.memory_stats(1)["segment.all.current"]
    assert line.split("|")[1].strip() == str(current)
    del tensor


def test_raw_blocks():
    before = torch.foo.memory_allocated(1)
    address = torch.foo.caching_allocator_alloc(1000, 1)
    assert torch.foo.memory_allocated(1) == before + 1024
    torch.foo.caching_allocator_delete(address)
    assert torch.foo.memory_allocated(1) == before


def test_no_growth_over_many_operators(one_thread):
    tensor = torch.rand(100, device="foo")
    for _ in range(1000):
        tensor = (tensor * 0.5 + tensor.abs() * 0.5).sigmoid()
    before = torch.foo.memory_allocated(), torch.foo.memory_reserved()
    for _ in range(20_000):
        tensor = (tensor * 0.5 + tensor.abs() * 0.5).sigmoid()
    assert (torch.foo.memory_allocated(), torch.foo.memory_reserved()) == before


def test_large_memory_is_not_returned_to_the_system():
    tensor = torch.ones(1 << 23, device="foo")
    tensor + tensor
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        tensor + tensor
    # With memory from the C library, each sum would touch 8192 new pages.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 1000


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
