"""A known function is not traced again, and no change of it is missed."""

import functools
import threading

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from foo_ops.ops.flex_attention import cache
from foo_ops.ops.flex_attention.trace import trace

QUERY = torch.empty(0)
FACTOR = 2.0
TABLE = torch.arange(4.0)
HELPER = None


@pytest.fixture
def traces(monkeypatch):
    """Record the traces."""
    counted = []
    record = cache.record
    monkeypatch.setattr(cache, "record", lambda *args: counted.append(args) or record(*args))
    monkeypatch.setattr(cache, "_known", {})
    return counted


def call(score_mod=None, mask_mod=None, query=QUERY):
    """Return the cached trace, after checking that a new trace is equal."""
    known, fresh = (f(score_mod, mask_mod, query) for f in (cache.traced, trace))
    for name in ("score_mod", "mask_mod", "backward", "numbers", "integers"):
        assert getattr(known, name) == getattr(fresh, name)
    for one, other in zip(known.captured, fresh.captured, strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
    return known


def scaled(factor, table):
    return lambda score, b, h, q, k: score * factor + table[h]


def test_the_same_function_defined_again(traces):
    tensors = [torch.ones(4), torch.zeros(4)]
    for tensor in tensors:
        assert call(scaled(2.0, tensor)).captured[0] is tensor
    assert len(traces) == 1


@pytest.mark.parametrize(
    "others",
    [
        [(1.0, torch.ones(4)), (2.0, torch.ones(4)), (2, torch.ones(4)), (True, torch.ones(4))],
        [(0.0, torch.ones(4)), (-0.0, torch.ones(4))],
        [(1.0, torch.ones(4)), (1.0, torch.ones(5)), (1.0, torch.ones(4, 2)[:, 0])],
        [(1.0, torch.ones(4)), (1.0, torch.ones(4).double()), (1.0, torch.ones(4).int())],
        [(1.0, torch.ones(4)), (1.0, torch.ones(4, requires_grad=True))],
        [(torch.ones(()), torch.ones(4)), (1.0, torch.ones(4))],
    ],
)
def test_what_is_closed_over(traces, others):
    for _ in range(2):
        for other in others:
            call(scaled(*other))
    assert len(traces) == len(others)


def test_one_tensor_twice_is_not_two(traces):
    def both(one, other):
        return lambda score, b, h, q, k: score + one[h] * other[h] + (1 if one is other else 2)

    table = torch.ones(4)
    for pair in ((table, table), (table, torch.ones(4))) * 2:
        call(both(*pair))
    assert len(traces) == 2


def test_globals(traces, monkeypatch):
    def score_mod(score, b, h, q, k):
        return score * FACTOR + TABLE[h]

    def of(name, value):
        monkeypatch.setitem(globals(), name, value)
        return call(score_mod)

    assert of("FACTOR", 2.0).numbers[0] == 2.0
    assert of("FACTOR", 3.0).numbers[0] == 3.0
    assert len(traces) == 2
    table = torch.zeros(4)
    assert of("TABLE", table).captured[0] is table
    assert len(traces) == 2


def test_functions_among_globals_and_cells(traces, monkeypatch):
    def score_mod(score, b, h, q, k):
        return HELPER(score)

    for helper in (lambda score: score * FACTOR, lambda score: score + FACTOR):
        monkeypatch.setitem(globals(), "HELPER", helper)
        for factor in (2.0, 3.0):
            monkeypatch.setitem(globals(), "FACTOR", factor)
            for _ in range(2):
                assert call(score_mod).numbers[0] == factor
    assert len(traces) == 4


def test_defaults_and_partials(traces):
    def score_mod(score, b, h, q, k, factor=2.0, *, shift=1.0):
        return score * factor + shift

    call(score_mod)
    score_mod.__defaults__ = (3.0,)
    assert call(score_mod).numbers[:2] == [3.0, 1.0]
    score_mod.__kwdefaults__["shift"] = 4.0
    assert call(score_mod).numbers[:2] == [3.0, 4.0]
    for shift in (5.0, 6.0, 6.0):
        assert call(functools.partial(score_mod, shift=shift)).numbers[:2] == [3.0, shift]
    assert len(traces) == 5


def test_composed_masks(traces):
    def window(size):
        return lambda b, h, q, k: q - k < size

    for size in (3, 4, 4):
        mask = and_masks(window(size), lambda b, h, q, k: q >= k)
        assert call(None, mask).integers == [size]
    assert len(traces) == 2


def test_computed_tables_are_computed_again(traces):
    table = torch.ones(4, 4, requires_grad=True)

    def score_mod(score, b, h, q, k):
        return score + (table * 2 + torch.arange(4.0)).T[1][h] + torch.tensor([1.0, 2.0])[b]

    for factor in (1, 2):
        with torch.no_grad():
            table.fill_(factor)
        captured = call(score_mod).captured
        assert captured[0].grad_fn is not None
        assert captured[0].tolist() == [2 * factor + 1.0] * 4
    assert len(traces) == 1


def test_values_in_python_are_read_again(traces):
    table = torch.ones(4)
    readers = (
        lambda score, b, h, q, k: score * table[1].item(),
        lambda score, b, h, q, k: score * table.tolist()[1],
        lambda score, b, h, q, k: score * float(table.numpy()[1]),
        lambda score, b, h, q, k: score * (2.0 if table.sum() > 5 else 1.0),
    )
    for reader in readers:
        for value in (1.0, 2.0):
            table.fill_(value)
            assert call(reader).numbers[0] == value


def test_objects_are_read_again(traces):
    class Owner:
        factor = 2.0

        def __call__(self, score, b, h, q, k):
            return score * self.factor

    owner = Owner()
    for function in (owner, owner.__call__, lambda *args: owner(*args)):
        for factor in (2.0, 3.0):
            owner.factor = factor
            assert call(function).numbers[0] == factor

    def score_mod(score, b, h, q, k):
        return score * score_mod.factor

    for factor in (2.0, 3.0):
        score_mod.factor = factor
        assert call(score_mod).numbers[0] == factor


def test_lists_are_read_again(traces):
    factors = [2.0, [3.0]]
    score_mod = lambda score, b, h, q, k: score * factors[1][0]  # noqa: E731
    for factor in (3.0, 4.0, 4.0):
        factors[1][0] = factor
        assert call(score_mod).numbers[0] == factor
    assert len(traces) == 2


def test_what_is_around_a_call(traces):
    def score_mod(score, b, h, q, k):
        return score * torch.tensor(0.1)

    call(score_mod)
    with torch.no_grad():
        assert not call(score_mod).backward
    assert call(score_mod).backward
    call(score_mod, query=torch.empty(0, dtype=torch.float64))
    torch.set_default_dtype(torch.float64)
    try:
        call(score_mod)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(traces) == 4


def test_few_are_kept(traces, monkeypatch):
    monkeypatch.setattr(cache, "CAPACITY", 3)
    for size in range(5):
        call(None, lambda b, h, q, k, size=size: q < size)
    assert len(cache._known) == 3


def test_threads():
    results = []

    def work(seed):
        for number in range(50):
            table = torch.full((4,), float(seed))
            known = cache.traced(scaled(float(number % 7), table), None, QUERY)
            results.append(known.numbers[0] == number % 7 and known.captured[0] is table)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 400
