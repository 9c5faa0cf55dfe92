"""Memory of small results is kept by each thread for its next results."""

import itertools
import threading

import pytest
import torch
from support.forked import succeeds

import foo_ops

SIZES = (1, 63, 64, 65, 1000, 1024, 32 << 10, (32 << 10) + 1)


def result(size, value=-1):
    """A result of so many bytes, whose elements are ``abs(value)``."""
    return foo_ops.abs(torch.full((size,), value, dtype=torch.int8))


def holds(tensor, size, value=1):
    return tensor.nbytes == size and bool((tensor == value).all())


@pytest.mark.parametrize("size", SIZES[:-1])
def test_memory_is_used_again(size):
    first = result(size)
    address = first.data_ptr()
    assert address % 64 == 0
    del first
    again = result(size)
    assert again.data_ptr() == address
    assert holds(again, size)


@pytest.mark.parametrize("size", SIZES)
def test_living_results_do_not_overlap(size):
    results = [result(size, -(number % 100)) for number in range(300)]
    assert all(holds(it, size, number % 100) for number, it in enumerate(results))
    places = sorted(it.data_ptr() for it in results)
    assert all(other - one >= size for one, other in itertools.pairwise(places))


def test_empty_results_have_no_memory():
    assert foo_ops.abs(torch.empty(0)).data_ptr() == 0


def test_more_results_than_there_is_memory_of_this_kind():
    """The C library serves the others."""
    size, count = 32 << 10, 2500
    results = [result(size, -(number % 100)) for number in range(count)]
    assert all(holds(it, size, number % 100) for number, it in enumerate(results))
    del results
    assert holds(result(size), size)


def test_results_outlive_their_thread_and_are_freed_by_others():
    made = []

    def make():
        made.append([result(size) for size in SIZES for _ in range(200)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for results in made:
        assert all(holds(it, it.nbytes) for it in results)
    freeing = threading.Thread(target=made.clear)
    freeing.start()
    freeing.join()
    assert holds(result(1000), 1000)


def test_memory_of_ended_threads_is_used_again():
    """Otherwise threads that come and go would use it up."""
    places = set()
    for _ in range(300):
        each = threading.Thread(target=lambda: places.add(result(32 << 10).data_ptr()))
        each.start()
        each.join()
    assert len(places) < 20


def test_a_forked_child_uses_them():
    kept = result(100)

    def use():
        assert holds(kept, 100)
        assert holds(result(100, -3), 100, 3)

    assert succeeds(use)
    assert holds(kept, 100)
    assert holds(result(100), 100)


def test_views_keep_the_memory():
    part = result(1000)[10:20]
    others = [result(1000, -2) for _ in range(10)]
    assert holds(part, 10)
    assert all(holds(it, 1000, 2) for it in others)


def test_results_can_be_resized():
    tensor = result(64)
    tensor.resize_(100_000)
    assert bool((tensor[:64] == 1).all())
