"""Memory pools: tensors made under a pool use its segments, which end with the pool."""

import gc
import threading

import pytest
import torch
from support.processes import python

MB = 1 << 20


def data(size, device="foo"):
    return torch.zeros(size, dtype=torch.uint8, device=device)


def segment_of(tensor, segments):
    address = tensor.data_ptr()
    return next(
        (it for it in segments if it["address"] <= address < it["address"] + it["total_size"]), None
    )


@pytest.mark.parametrize("size", [100, 3 * MB])
def test_tensors_lie_in_segments_of_the_pool(size):
    cached = data(size)
    del cached
    pool = torch.foo.MemPool()
    before = data(size)
    with torch.foo.use_mem_pool(pool):
        inside = data(size)
        again = inside + 1
    after = data(size)
    segments = pool.snapshot()
    assert segment_of(inside, segments)
    assert segment_of(again, segments)
    assert not segment_of(before, segments)
    assert not segment_of(after, segments)
    assert {it["segment_pool_id"] for it in segments} == {pool.id}
    assert segment_of(after, torch.foo.memory_snapshot())["segment_pool_id"] == (0, 0)
    assert sum(it["requested_size"] for it in segments) == 2 * size


def test_memory_is_used_again_inside_of_the_pool_alone():
    pool = torch.foo.MemPool()
    with torch.foo.use_mem_pool(pool):
        address = data(3 * MB).data_ptr()
    outside = [data(3 * MB) for _ in range(20)]
    assert address not in [it.data_ptr() for it in outside]
    with torch.foo.use_mem_pool(pool):
        assert data(3 * MB).data_ptr() == address


def test_memory_goes_back_with_the_pool():
    gc.collect()
    torch.foo.empty_cache()
    before = torch.foo.memory_reserved()
    pool = torch.foo.MemPool()
    with torch.foo.use_mem_pool(pool):
        kept, other = data(30 * MB), data(100)
    inside = torch.foo.memory_reserved()
    assert inside >= before + 32 * MB
    del other
    torch.foo.empty_cache()
    assert torch.foo.memory_reserved() == inside  # a pool in use keeps its memory
    del pool
    assert before + 30 * MB <= torch.foo.memory_reserved() < inside
    kept.fill_(7)
    assert kept.max().item() == 7
    del kept
    torch.foo.empty_cache()
    assert torch.foo.memory_reserved() <= before


def test_users_are_counted():
    pool = torch.foo.MemPool()
    assert pool.use_count() == 1
    with torch.foo.use_mem_pool(pool), torch.foo.use_mem_pool(pool):
        assert pool.use_count() == 3
    assert pool.use_count() == 1
    graph = torch.foo.FooGraph()
    with torch.foo.graph(graph, pool=pool.id):
        tensor = torch.ones(3, device="foo")
    assert pool.use_count() == 2
    assert graph.pool() == pool.id
    assert segment_of(tensor, pool.snapshot())
    graph.reset()
    assert pool.use_count() == 1
    assert pool.allocator is None


def test_pools_nest_and_belong_to_a_thread_and_a_device():
    outer, inner = torch.foo.MemPool(), torch.foo.MemPool()
    assert outer.id != inner.id
    others = []
    with torch.foo.use_mem_pool(outer):
        first = data(10)
        with torch.foo.use_mem_pool(inner):
            second = data(10)
        third = data(10)
        thread = threading.Thread(target=lambda: others.append(data(10)))
        thread.start()
        thread.join()
        others.append(data(10, "foo:1"))
    assert segment_of(first, outer.snapshot())
    assert segment_of(second, inner.snapshot())
    assert segment_of(third, outer.snapshot())
    assert not any(segment_of(it, outer.snapshot()) for it in others)
    with torch.foo.use_mem_pool(outer, device=1):
        there, here = data(10, "foo:1"), data(10)
    assert segment_of(there, outer.snapshot())["device"] == 1
    assert not segment_of(here, outer.snapshot())


def test_an_exception_ends_the_use():
    pool = torch.foo.MemPool()
    with pytest.raises(KeyError), torch.foo.use_mem_pool(pool):
        raise KeyError
    assert pool.use_count() == 1
    assert not segment_of(data(10), pool.snapshot())


def test_segments_that_are_not_split():
    pool = torch.foo.MemPool(no_split=True)
    with torch.foo.use_mem_pool(pool):
        tensors = [data(100) for _ in range(3)]
    segments = pool.snapshot()
    assert len(segments) == 3
    assert [len(it["blocks"]) for it in segments] == [1, 1, 1]
    assert len({segment_of(it, segments)["address"] for it in tensors}) == 3


LIMITED = """
import torch
MB = 1 << 20
def data(size): return torch.empty(size, dtype=torch.uint8, device="foo")
pool = torch.foo.MemPool(use_on_oom={use_on_oom})
with torch.foo.use_mem_pool(pool):
    data(40 * MB)
try:
    data(30 * MB)
    print("served")
except torch.OutOfMemoryError:
    print("refused")
"""


@pytest.mark.parametrize(("use_on_oom", "expected"), [(True, "served"), (False, "refused")])
def test_a_pool_may_serve_others_when_memory_is_short(use_on_oom, expected):
    process = python(LIMITED.format(use_on_oom=use_on_oom), FOO_MEMORY_LIMIT="64M")
    assert process.stdout.split() == [expected], process.stderr


def test_other_allocators_are_refused():
    reason = (
        "device foo does not support other allocators; its memory is host memory, which a program "
        "can allocate itself and share through DLPack"
    )
    with pytest.raises(NotImplementedError) as error:
        torch.foo.MemPool(allocator=object())
    assert str(error.value) == f"MemPool: {reason}"
    with pytest.raises(NotImplementedError) as error:
        torch.foo.change_current_allocator(object())
    assert str(error.value) == f"change_current_allocator: {reason}"
