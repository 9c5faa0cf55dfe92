"""The compiler leaves Python's garbage collector as it was."""

import contextlib
import gc
import math
import threading
import weakref

import pytest
import torch

from foo_ops import library
from foo_ops.kernels.compiler.emit import without_garbage_collection


@pytest.fixture(autouse=True)
def enabled_again():
    thresholds = gc.get_threshold()
    # conftest.py freezes all objects before the tests.
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()
    gc.set_threshold(*thresholds)


def collects():
    """Return whether automatic garbage collection is on."""
    phases = []
    gc.callbacks.append(lambda phase, _: phases.append(phase))
    kept = [[number] for number in range(10 * gc.get_threshold()[0] + 10_000)]
    gc.callbacks.pop()
    return len(kept) > 0 and len(phases) > 0


def test_on_again_even_after_an_error():
    thresholds = gc.get_threshold()
    with contextlib.suppress(KeyError), without_garbage_collection():
        assert not collects()
        raise KeyError
    assert gc.isenabled()
    assert gc.get_threshold() == thresholds
    assert collects()


def test_stays_off_where_it_was_off():
    gc.disable()
    with without_garbage_collection():
        pass
    assert not gc.isenabled()
    assert not collects()


def test_stays_off_where_another_thread_switches_it_off_meanwhile():
    with without_garbage_collection():
        gc.disable()
    assert not gc.isenabled()
    assert not collects()


def test_thresholds_that_another_thread_sets_meanwhile_stay():
    with without_garbage_collection():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_off_until_the_last_of_two_threads_leaves(first_leaves_first):
    thresholds = gc.get_threshold()
    entered, leave = threading.Event(), threading.Event()

    def work():
        with without_garbage_collection():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=work)

    def end_thread():
        leave.set()
        thread.join()

    with contextlib.ExitStack() as stack:
        stack.enter_context(without_garbage_collection())
        thread.start()
        entered.wait()
        leaving = [stack.close, end_thread]
        for leave_one in leaving if first_leaves_first else reversed(leaving):
            assert not collects()
            leave_one()
    assert gc.get_threshold() == thresholds
    assert collects()


def test_new_objects_are_no_longer_young():
    gc.collect()
    with without_garbage_collection():
        made = [[number] for number in range(1000)]
    youngest, middle = gc.get_objects(0), gc.get_objects(1)
    identities = {id(item) for item in made}
    assert not identities & {id(item) for item in (*youngest, *middle)}
    assert identities <= {id(item) for item in gc.get_objects(2)}


def test_what_somebody_froze_stays_frozen():
    frozen = [[]]
    gc.freeze()
    with without_garbage_collection():
        pass
    assert not {id(frozen)} & {id(item) for item in gc.get_objects()}


class Linked:
    """An object that refers to itself: only the collector frees it."""

    def __init__(self):
        self.own = self


def test_garbage_of_the_compiler_is_collected_at_once():
    """Old garbage stays: with torch, visiting all old objects takes a tenth of a second."""
    old = weakref.ref(Linked())
    with without_garbage_collection():
        assert old() is not None
    with without_garbage_collection(leaves_garbage=True):
        new = weakref.ref(Linked())
        assert new() is not None
    assert new() is None
    assert old() is not None


def test_nothing_is_collected_where_collection_is_off():
    gc.disable()
    with without_garbage_collection(leaves_garbage=True):
        new = weakref.ref(Linked())
    assert new() is not None


def test_a_kernel_leaves_few_objects():
    """Its LLVM is kept as bytes and Numba's IR is dropped: together these are 10,000 objects."""
    operators = [library.numba_op(f"foo_garbage::f{i}")(logistic) for i in range(2)]
    operators[0](torch.ones(3))
    gc.collect()
    before = len(gc.get_objects())
    operators[1](torch.ones(3, dtype=torch.float64))
    gc.collect()
    assert len(gc.get_objects()) - before < 2500


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))
