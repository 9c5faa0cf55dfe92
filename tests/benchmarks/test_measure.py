"""The kernels for the peaks do all their operations, and contenders are timed in turn."""

import dataclasses

import numpy as np
import pytest
import torch
from support.processes import python

from benchmarks import (
    peaks,
)
from benchmarks.measure import Case, Limits, Local, calls_per_turn, measure
from foo_ops.kernels.compiler.processor import has_bfloat16_dot, has_matrix_unit, vector_bits

TINY = Limits(rounds=3, turn=1e-4, contender=1e-3)


# ----------------------------------------------------------------------------------------- peaks


def test_kernel_of_the_peak_does_all_its_operations():
    a, b, total = (
        np.full(16, 3, np.float32),
        np.full(16, 0.25, np.float32),
        np.zeros(16, np.float32),
    )
    peaks.compiled(peaks.fma_kernel)(total.ctypes.data, a.ctypes.data, b.ctypes.data, 5)
    lanes = vector_bits() // 32
    starts = sum(range(peaks.CHAINS))
    assert total[:lanes].tolist() == [starts + 5 * peaks.CHAINS * 3 * 0.25] * lanes


@pytest.mark.parametrize("run", [16, 256, 1024])
def test_kernel_of_the_bandwidth_reads_all(run):
    data = np.arange(4096, dtype=np.float32)
    total = np.zeros(16, np.float32)
    peaks.compiled(peaks.read_kernel)(total.ctypes.data, data.ctypes.data, data.size, run)
    assert total.sum() == data.sum()


COMPILE_BF16_DOT = """
from benchmarks import peaks
from foo_ops.kernels.compiler import emit

assert peaks.compute_peak("bfloat16") == peaks.BF16_DOT
assert peaks.compute_peak("float32") == peaks.compute_peak("float16") == peaks.FMA
assert emit.compile_kernel(peaks.bf16_dot_kernel)
"""


def test_kernel_of_bfloat16_compiles_for_a_processor_that_has_it():
    features = "+avx,+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512bf16"
    process = python(COMPILE_BF16_DOT, NUMBA_CPU_NAME="znver4", NUMBA_CPU_FEATURES=features)
    assert process.returncode == 0, process.stderr


@pytest.mark.skipif(not has_bfloat16_dot(), reason="needs AVX512-BF16")
def test_kernel_of_bfloat16_does_all_its_operations():
    lanes = vector_bits() // 32
    a, b = (
        torch.full((2 * lanes,), 3, dtype=torch.bfloat16),
        torch.full((2 * lanes,), 0.25).bfloat16(),
    )
    total = torch.zeros(lanes)
    peaks.compiled(peaks.bf16_dot_kernel)(total.data_ptr(), a.data_ptr(), b.data_ptr(), 5)
    starts = sum(range(peaks.CHAINS))
    assert total.tolist() == [starts + 5 * peaks.CHAINS * 2 * 3 * 0.25] * lanes


@pytest.mark.skipif(not has_matrix_unit(), reason="needs a matrix unit")
def test_kernel_of_the_matrix_unit_does_all_its_operations():
    a, b = torch.full((512,), 3.0).bfloat16(), torch.full((512,), 0.25).bfloat16()
    total = torch.zeros(256)
    peaks.compiled(peaks.matrix_kernel)(total.data_ptr(), a.data_ptr(), b.data_ptr(), 5)
    # A quarter of the products go to the stored register.
    assert total.tolist() == [5 * peaks.CHAINS / 4 * 32 * 3 * 0.25] * 256


def test_a_matrix_unit_is_the_peak_of_bfloat16(monkeypatch):
    monkeypatch.setattr(peaks, "has_matrix_unit", lambda: True)
    assert peaks.compute_peak("bfloat16") == peaks.MATRIX
    assert peaks.compute_peak("float32") == peaks.compute_peak("float16") == peaks.FMA


def test_every_peak_has_rows(monkeypatch):
    monkeypatch.setattr(peaks, "SECONDS", 1e-4)
    monkeypatch.setattr(peaks, "_beyond_the_caches", lambda: torch.ones(1 << 16))
    results = peaks.measure_peaks((1, 2), rounds=2)
    found = {(it.name, it.threads): it.seconds.get(it.name) for it in results}
    assert set(found) >= {(peaks.FMA, 1), (peaks.FMA, 2), (peaks.READ, 1), (peaks.READ, 2)}
    if not has_bfloat16_dot():
        assert found.pop((peaks.BF16_DOT, 1)) is None
    assert ((peaks.MATRIX, 2) in found) == has_matrix_unit()
    # Plausible for any machine: 1e7 to 1e13 per second.
    assert all(1e7 < 1 / second < 1e13 for seconds in found.values() for second in seconds)


# --------------------------------------------------------------------------------------- measure


class Clock:
    """A contender whose calls report a given time, without waiting."""

    def __init__(self, seconds, result=1.0):
        self.seconds = seconds
        self.result = torch.tensor([result])
        self.turns = []

    def results(self):
        return [self.result]

    def time(self, calls, threads):
        self.turns.append((calls, threads))
        return calls * self.seconds / threads


class Recorder:
    """Records the order of all contenders' turns in one list, in place of `Clock.turns`."""

    def __init__(self, order, name):
        self.order = order
        self.name = name

    def append(self, turn):
        self.order.append(self.name)


def clock_case(**contenders):
    makers = {name: (lambda it=it: it) for name, it in contenders.items()}
    return Case("calls", "clocks", lambda: makers, threads=(1, 2), references={"one": float})


def test_seconds_are_those_of_a_call():
    limits = Limits(rounds=4, turn=1.0, contender=100.0)
    one, two = measure(clock_case(foo=Clock(0.01), torch=Clock(0.02)), limits)
    assert (one.threads, two.threads) == (1, 2)
    assert one.seconds == {"foo": pytest.approx([0.01] * 4), "torch": pytest.approx([0.02] * 4)}
    assert two.seconds == {"foo": pytest.approx([0.005] * 4), "torch": pytest.approx([0.01] * 4)}
    assert (one.references, two.references) == ({"one": [1.0] * 4}, {"one": [2.0] * 4})


def test_seconds_are_those_of_a_step():
    """Turns are as many as for the whole calls."""
    limits = Limits(rounds=9, turn=0.1, contender=2.0)
    case = dataclasses.replace(clock_case(foo=Clock(1.0), torch=Clock(0.5)), steps=8)
    one, two = measure(case, limits)
    assert one.seconds == {"foo": [0.125] * 3, "torch": [0.0625] * 4}
    assert two.seconds == {"foo": [0.0625] * 4, "torch": [0.03125] * 8}


def test_slow_contenders_leave_early():
    limits = Limits(rounds=9, turn=0.1, contender=2.0, fewest=3, long_call=5.0)
    contenders = {"foo": Clock(0.1), "quick": Clock(0.5), "slow": Clock(3.0), "snail": Clock(9.0)}
    one, _ = measure(clock_case(**contenders), limits)
    turns = {name: len(seconds) for name, seconds in one.seconds.items()}
    assert turns == {"foo": 9, "quick": 4, "slow": 3, "snail": 1}
    # After a first call, which may compile, the one that measured its duration counts as its turn.
    assert contenders["snail"].turns.count((1, 1)) == 2


def test_a_case_may_ask_for_more_rounds():
    limits = Limits(rounds=3, turn=0.1, contender=0.5)
    contenders = {"foo": Clock(0.1), "torch": Clock(0.5)}
    one, _ = measure(dataclasses.replace(clock_case(**contenders), repeat=4), limits)
    assert {name: len(seconds) for name, seconds in one.seconds.items()} == {"foo": 12, "torch": 12}


def test_the_order_alternates():
    order = []
    clocks = {name: Clock(1.0) for name in ("foo", "torch")}
    for name, clock in clocks.items():
        clock.turns = Recorder(order, name)
    case = dataclasses.replace(clock_case(**clocks), threads=(1,))
    measure(case, Limits(rounds=4, turn=0.1, contender=100.0))
    assert order[-8:] == ["foo", "torch", "torch", "foo"] * 2


def test_a_turn_of_many_calls_warms_up_and_fills_its_time():
    clock = Clock(0.01)
    calls, seconds = calls_per_turn(clock, 1, 1.0)
    assert calls * 0.01 >= 1.0
    assert seconds == pytest.approx(0.01)
    limits = Limits(rounds=1, turn=1.0, contender=100.0)
    clock.turns.clear()
    measure(clock_case(foo=clock), limits)
    assert clock.turns[-2:] == [(200, 2), (200, 2)]


def test_ours_must_agree_with_a_peer():
    with pytest.raises(
        ArithmeticError, match=r"clocks: foo differs from each peer: {'torch': 0\.5}"
    ):
        measure(clock_case(foo=Clock(1.0, 1.0), torch=Clock(1.0, 2.0)), TINY)


def test_a_peer_alone_with_its_result_is_left_out():
    contenders = {"foo": Clock(1.0), "flash": Clock(1.0, 1.001), "flex": Clock(1.0, float("nan"))}
    for result in measure(clock_case(**contenders), TINY):
        assert result.peers() == ["flash"]
        assert result.failures == {"flex": "its result differs by nan from ours and others"}


def test_a_peer_that_fails_is_noted_and_ours_is_not_excused():
    def broken():
        raise ValueError("no such kernel\nand more")

    case = Case("calls", "one fails", lambda: {"foo": lambda: Clock(1.0), "torch": broken})
    (result,) = measure(case, TINY)
    assert result.failures == {"torch": "ValueError: no such kernel"}
    assert list(result.seconds) == ["foo"]
    with pytest.raises(ValueError, match="no such kernel"):
        measure(Case("calls", "ours fails", lambda: {"foo": broken}), TINY)


def test_threads_are_those_asked_for_and_set_back():
    seen = []
    before = torch.get_num_threads()
    Local(lambda: seen.append(torch.get_num_threads())).time(2, before + 1)
    assert seen == [before + 1] * 2
    assert torch.get_num_threads() == before


class DividedClock(Clock):
    """A contender whose calls have two parts."""

    def parts(self, threads):
        self.turns.append("parts")
        return {"first": self.seconds / 4, "second": self.seconds * 3 / 4 / threads}


def test_parts_of_calls_have_rows_of_their_own():
    divided = DividedClock(1.0)
    case = clock_case(foo=divided, torch=Clock(2.0), flash=DividedClock(4.0))
    rows = measure(case, Limits(rounds=9, turn=0.1, contender=100.0, fewest=3))
    assert [(it.name, it.threads) for it in rows] == [
        *(("clocks", threads) for threads in (1, 2)),
        *((f"clocks: {part}", threads) for threads in (1, 2) for part in ("first", "second")),
    ]
    assert [it.seconds for it in rows[2:]] == [
        {"foo": [0.25] * 3, "flash": [1.0] * 3},
        {"foo": [0.75] * 3, "flash": [3.0] * 3},
        {"foo": [0.25] * 3, "flash": [1.0] * 3},
        {"foo": [0.375] * 3, "flash": [1.5] * 3},
    ]
    # A profiler may slow down calls, so that all turns come first.
    assert divided.turns[-6:] == ["parts"] * 6
    assert "parts" not in divided.turns[:-6]
