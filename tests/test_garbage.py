"""The compiler leaves Python's garbage collection as it was."""

import contextlib
import gc

import pytest

from foo_ops.kernels.garbage import without_garbage_collection


@pytest.fixture(autouse=True)
def enabled_again():
    yield
    gc.unfreeze()
    gc.enable()


def test_on_again_even_after_an_error():
    with contextlib.suppress(KeyError), without_garbage_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_stays_off_where_it_was_off():
    gc.disable()
    with without_garbage_collection():
        pass
    assert not gc.isenabled()


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
