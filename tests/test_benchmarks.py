"""The benchmark counts right, judges right, and its pieces run on tiny sizes."""

import dataclasses
import importlib.util
import io
import itertools
import re
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import (
    attention,
    cases,
    code_lines,
    device,
    peaks,
    plots,
    report,
    targets,
    zentorch_process,
)
from benchmarks.measure import Case, Limits, Local, Result, calls_per_turn, measure
from benchmarks.workload import Workload
from foo_ops.kernels.target import has_bfloat16_dot, has_matrix_unit, vector_bits

TINY = Limits(rounds=3, turn=1e-4, contender=1e-3)
HAS_ZENTORCH = importlib.util.find_spec("zentorch") is not None
FORWARD = Workload("forward", "float32", True, 128, 128, 16)


# -------------------------------------------------------------------------------------- workload


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_operations_are_those_of_visible_pairs(queries, keys, is_causal):
    workload = Workload("forward", "float32", is_causal, queries, keys, 16, 2, 6, 3)
    pairs = torch.ones(queries, keys).tril() if is_causal else torch.ones(queries, keys)
    products = 2 * (2 * 16)
    assert workload.flops() == 2 * 6 * pairs.sum().item() * products
    backward = dataclasses.replace(workload, direction="backward")
    assert backward.flops() == 2.5 * workload.flops()


@pytest.mark.parametrize(
    "options",
    [{"window": 3}, {"is_packed": True}, {"is_causal": False, "is_packed": True}],
    ids=str,
)
def test_operations_are_those_of_the_pairs_that_an_option_leaves(options):
    workload = dataclasses.replace(FORWARD, query_length=25, key_length=25, **options)
    query, key = torch.arange(25)[:, None], torch.arange(25)
    seen = (query >= key) | (not workload.is_causal)
    if workload.window:
        seen &= query - key < 3
    if workload.is_packed:
        # 2, 5 and 7 of 25, and the rest.
        starts = torch.tensor([2, 7, 14])
        seen &= torch.bucketize(query, starts, right=True) == torch.bucketize(
            key, starts, right=True
        )
    assert workload.visible_pairs() == seen.sum()


def test_operations_with_a_value_of_another_dimension():
    workload = Workload("forward", "float32", False, 3, 5, 16, 1, 2, 2, value_dim=7)
    assert workload.flops() == 2 * 3 * 5 * (2 * 16 + 2 * 7)
    backward = dataclasses.replace(workload, direction="backward")
    assert backward.flops() == 2 * 3 * 5 * (3 * 2 * 16 + 2 * 2 * 7)


def test_bytes_of_the_cache_are_those_of_keys_and_values():
    workload = Workload("forward", "bfloat16", False, 1, 100, 16, 3, 8, 2)
    (_, key, value) = workload.inputs()[0]
    assert workload.cache_bytes() == key.nbytes + value.nbytes


def test_inputs_are_taken_in_turn():
    workload = Workload("forward", "float16", False, 2, 3, 4, copies=3)
    call = workload.in_turn(lambda query, key, value: query.sum() + key.sum() + value.sum())
    first, *others = [call().item() for _ in range(4)]
    assert others[-1] == first
    assert len({first, *others}) == 3


def test_caches_of_decoding_do_not_fit_into_the_processor():
    workloads = list(cases.decoding_workloads(cases.DEFAULT))
    assert len(workloads) == 8
    for workload in workloads:
        assert workload.copies * workload.cache_bytes() >= peaks.bytes_beyond_the_caches()


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


def test_kernel_of_the_bandwidth_reads_all():
    data = np.arange(4096, dtype=np.float32)
    total = np.zeros(16, np.float32)
    peaks.compiled(peaks.read_kernel)(total.ctypes.data, data.ctypes.data, data.size)
    assert total.sum() == data.sum()


COMPILE_BF16_DOT = """
from benchmarks import peaks
from foo_ops.kernels import jit

assert peaks.compute_peak("bfloat16") == peaks.BF16_DOT
assert peaks.compute_peak("float32") == peaks.compute_peak("float16") == peaks.FMA
assert jit.compile_kernel(peaks.bf16_dot_kernel)
"""


def test_kernel_of_bfloat16_compiles_for_a_processor_that_has_it(monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", "znver4")
    features = "+avx,+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512bf16"
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    assert subprocess.run([sys.executable, "-c", COMPILE_BF16_DOT]).returncode == 0


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
    # A quarter of the products go to the register that is stored.
    assert total.tolist() == [5 * peaks.CHAINS / 4 * 32 * 3 * 0.25] * 256


def test_a_matrix_unit_is_the_peak_of_bfloat16(monkeypatch):
    monkeypatch.setattr(peaks, "has_matrix_unit", lambda: True)
    assert peaks.compute_peak("bfloat16") == peaks.MATRIX
    assert peaks.compute_peak("float32") == peaks.compute_peak("float16") == peaks.FMA


def test_every_peak_has_rows(monkeypatch):
    monkeypatch.setattr(peaks, "SECONDS", 1e-4)
    monkeypatch.setattr(peaks, "_beyond_the_caches", lambda: torch.ones(1 << 16))
    results = peaks.measure_peaks(processors=2, rounds=2)
    found = {(it.name, it.threads): it.seconds.get(it.name) for it in results}
    assert set(found) >= {(peaks.FMA, 1), (peaks.FMA, 2), (peaks.READ, 1), (peaks.READ, 2)}
    if not has_bfloat16_dot():
        assert found.pop((peaks.BF16_DOT, 1)) is None
    assert ((peaks.MATRIX, 2) in found) == has_matrix_unit()
    # No machine does a million times more or less in a second.
    assert all(1e7 < 1 / second < 1e13 for seconds in found.values() for second in seconds)


# --------------------------------------------------------------------------------------- measure


class Clock:
    """A contender whose calls take what it is told, without waiting."""

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
    """In place of a clock's turns: one list says whose turn it was, for all clocks."""

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


def test_slow_contenders_leave_early():
    limits = Limits(rounds=9, turn=0.1, contender=2.0, fewest=3, long_call=5.0)
    contenders = {"foo": Clock(0.1), "quick": Clock(0.5), "slow": Clock(3.0), "snail": Clock(9.0)}
    one, _ = measure(clock_case(**contenders), limits)
    turns = {name: len(seconds) for name, seconds in one.seconds.items()}
    assert turns == {"foo": 9, "quick": 4, "slow": 3, "snail": 1}
    # The call that has shown how long it takes is its turn.
    assert contenders["snail"].turns.count((1, 1)) == 1


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


# ------------------------------------------------------------------------------------- contenders


def test_every_contender_of_a_tiny_forward_pass(fresh_compiler, monkeypatch):
    """One whose result differs would be missing."""
    monkeypatch.setattr(attention, "THREADS", (1,))
    workload = dataclasses.replace(FORWARD, query_length=512, key_length=512)
    (result,) = measure(cases.attention_case(workload, (1,)), TINY)
    assert result.peers() == ["flash", "math", "flex"] + ["zentorch"] * HAS_ZENTORCH
    assert set(result.failures) == (set() if HAS_ZENTORCH else {"zentorch"})
    assert all(second > 0 for seconds in result.seconds.values() for second in seconds)
    assert len(result.references[peaks.FMA]) == TINY.rounds


@pytest.mark.parametrize("options", cases.OPTIONS, ids=str)
@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_every_option(options, direction, monkeypatch):
    """Each contender does the same work as ours, or it would be missing."""
    monkeypatch.setattr(attention, "flex", lambda workload: Clock(1.0)["left out"])
    plain = Workload(direction, "float32", False, 256, 256, 64)
    case = cases.attention_case(dataclasses.replace(plain, **options), (1,))
    (result,) = measure(case, TINY)
    assert result.section == "attention options"
    has_flash = "window" in options or "is_packed" in options
    has_zentorch = HAS_ZENTORCH and has_flash and direction == "forward"
    assert result.peers() == ["flash"] * has_flash + ["math"] + ["zentorch"] * has_zentorch
    assert targets.requirements(result, None) == []


@pytest.mark.parametrize("options", [{"window": 128}, {"is_packed": True}], ids=str)
def test_flex_sees_what_ours_sees(options):
    workload = Workload("forward", "float32", True, 300, 300, 64, **options)
    seen = torch.full((300, 300), -torch.inf)
    seen[attention.mask_mod(workload)(0, 0, torch.arange(300)[:, None], torch.arange(300))] = 0
    inputs = workload.inputs()[0]
    torch.testing.assert_close(
        attention.with_batch(lambda *it: F.scaled_dot_product_attention(*it, seen))(*inputs)
        if workload.is_packed
        else F.scaled_dot_product_attention(*inputs, seen),
        attention.ours(workload).function(),
    )


def test_flex_takes_part_where_it_is_worth_its_compilation():
    long = Workload("forward", "float32", True, 512, 512, 64)
    names = {
        dtype: list(attention.contenders(dataclasses.replace(long, dtype=dtype)))
        for dtype in ("float32", "float16")
    }
    assert names["float32"] == ["foo", "flash", "math", "flex", "zentorch"]
    assert names["float16"] == ["foo", "flash", "math", "zentorch"]


@pytest.mark.parametrize(
    "changes",
    [
        {"direction": "backward"},
        {"direction": "backward", "dtype": "bfloat16", "query_heads": 32, "is_causal": False},
        {"dtype": "float16", "head_dim": 32},
        {"query_length": 1, "is_causal": False, "query_heads": 16, "copies": 2},
    ],
    ids=str,
)
def test_every_kind_of_row(changes, monkeypatch):
    """Without those that compile, or start a process."""
    for name in ("flex", "Zentorch"):
        monkeypatch.setattr(attention, name, lambda workload: Clock(1.0)["left out"])
    monkeypatch.setattr(peaks, "_beyond_the_caches", lambda: torch.ones(1 << 16))
    workload = dataclasses.replace(FORWARD, **changes)
    make = cases.decoding_case if workload.is_decoding else cases.attention_case
    (result,) = measure(make(workload, (1,)), TINY)
    assert result.peers() == ["flash", "math"]
    compiled = {"flex"} if workload.is_decoding else set()
    assert set(result.failures) == ({"zentorch"} | compiled if not workload.is_backward else set())
    assert result.work == (workload.cache_bytes() if workload.is_decoding else workload.flops())
    has_float32 = workload.dtype == "float16" and not workload.is_backward
    assert (targets.FLOAT32 in result.references) == has_float32


def test_math_is_left_out_where_its_scores_would_fill_memory():
    assert "math" in attention.contenders(Workload("forward", "float32", True, 2048, 2048, 64))
    assert "math" not in attention.contenders(Workload("forward", "float32", True, 8192, 8192, 64))


@pytest.mark.skipif(not HAS_ZENTORCH, reason="needs zentorch")
def test_zentorch_says_why_it_fails_and_goes_on():
    wrong = dataclasses.replace(FORWARD, dtype="float8_e4m3fn")
    with pytest.raises(Exception, match=r"Float8|float8"):
        zentorch_process.Zentorch(wrong)
    assert zentorch_process.Zentorch(FORWARD).time(1, 1) > 0


def test_process_of_zentorch_that_ends(monkeypatch):
    class Ended:
        def send(self, message):
            pass

        def recv(self):
            raise EOFError

    monkeypatch.setattr(zentorch_process, "process", Ended)
    with pytest.raises(RuntimeError, match="zentorch has ended its process"):
        zentorch_process.Zentorch(FORWARD)


def test_zentorch_stays_out_of_this_process():
    assert "zentorch" not in sys.modules


def test_small_rows_of_other_sections():
    peers = {"calls": ["torch", "torch.ops.aten"], "abs": ["torch"]}
    for case in itertools.chain(cases.call_cases(), cases.abs_cases([100], 1)):
        (result,) = measure(case, TINY)
        assert result.peers() == peers[case.section]


# ---------------------------------------------------------------------------------------- targets


def test_verdict_of_a_device_row():
    def verdict(*seconds):
        seconds = {"foo": list(seconds), "cpu": [1.0] * len(seconds)}
        return targets.device_verdict(Result("device", device.TRAINING, 1, 0.0, True, seconds))

    assert verdict(0.9, 1.0, 1.1) == "reached"
    assert verdict(0.9, 1.01, 1.02, 1.03) == "level with the limit"
    assert verdict(1.1, 1.2, 1.3) == "longer by 20.0%"


def row(workload, threads=1, peak=peaks.FMA, **rates):
    """A result whose contenders and references have these rates in each of four rounds."""
    section = "attention decoding" if workload.is_decoding else f"attention {workload.direction}"
    references = {targets.FLOAT32: rates.pop("float32")} if "float32" in rates else {}
    return Result(
        section,
        f"{workload.dtype} {workload.mask}",
        threads,
        100.0,
        headline=True,
        seconds={name: [100.0 / it for it in values] for name, values in rates.items()},
        references={peak: [100.0] * 4, **references},
        workload=workload,
    )


def long(dtype, is_causal=False, direction="forward"):
    return Workload(direction, dtype, is_causal, 512, 512, 64)


@pytest.mark.parametrize(
    ("workload", "peak", "least"),
    [
        (long("float32"), peaks.FMA, 0.82),
        (long("float32", True), peaks.FMA, 0.75),
        (long("bfloat16"), peaks.BF16_DOT, 0.70),
        (long("bfloat16", True), peaks.BF16_DOT, 0.62),
        (long("bfloat16"), peaks.FMA, 0.82),
        (long("float32", False, "backward"), peaks.FMA, 0.75),
        (long("float32", True, "backward"), peaks.FMA, 0.65),
        (long("bfloat16", False, "backward"), peaks.BF16_DOT, 0.55),
        (long("bfloat16", True, "backward"), peaks.BF16_DOT, 0.48),
        (Workload("forward", "bfloat16", False, 1, 8192, 128), peaks.READ, 0.80),
    ],
    ids=str,
)
def test_fraction_of_the_peak(workload, peak, least):
    met = row(workload, peak=peak, foo=[100 * least + 0.01] * 4)
    assert targets.verdict(met, None) == "reached"
    half = row(workload, peak=peak, foo=[50 * least] * 4)
    assert targets.verdict(half, None) == f"short of {least:.2f} x {peak} by 50.0%"
    assert targets.target(half) == least


def test_float16_is_compared_with_our_float32():
    result = row(long("float16"), foo=[45.0] * 4, float32=[60.0] * 4)
    assert targets.verdict(result, None) == "short of 0.90 x our float32 by 16.7%"
    assert targets.target(result) == pytest.approx(0.9 * 0.6)
    backward = row(long("float16", False, "backward"), foo=[1.0] * 4)
    assert targets.verdict(backward, None) == "reached"
    assert targets.target(backward) is None


def test_short_lengths_are_compared_with_flash_alone():
    short = Workload("forward", "bfloat16", False, 128, 128, 64)
    result = row(short, foo=[30.0] * 4, flash=[25.0] * 4)
    assert targets.verdict(result, None) == "short of 1.50 x flash by 20.0%"
    wide = dataclasses.replace(short, head_dim=128)
    assert targets.verdict(row(wide, foo=[30.0] * 4, flash=[25.0] * 4), None) == "reached"


def test_two_threads_are_compared_with_one():
    one = row(long("float32"), foo=[90.0] * 4)
    assert targets.verdict(row(long("float32"), 2, foo=[180.0] * 4), one) == "reached"
    slow = row(long("float32"), 2, foo=[111.0] * 4)
    assert targets.verdict(slow, one) == "short of 1.85 x one thread by 33.3%"


def test_decoding_on_two_threads_is_compared_with_the_bandwidth_of_two():
    workload = Workload("forward", "float32", False, 1, 8192, 128)
    one = row(workload, peak=peaks.READ, foo=[90.0] * 4)
    assert targets.verdict(row(workload, 2, peaks.READ, foo=[90.0] * 4), one) == "reached"
    other = dataclasses.replace(workload, key_length=4096)
    assert targets.verdict(row(other, peak=peaks.READ, foo=[1.0] * 4), None) == "reached"


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([40.0, 41.0, 42.0, 43.0], "reached"),
        ([39.0, 39.0, 39.9, 41.0], "level with math"),
        ([20.0, 20.0, 20.0, 41.0], "slower than math by 50.0%"),
    ],
)
def test_the_fastest_peer_counts(ours, verdict):
    workload = long("float16", False, "backward")
    result = row(workload, foo=ours, flash=[30.0] * 4, math=[40.0] * 4)
    assert targets.best_peer(result) == "math"
    assert targets.verdict(result, None) == verdict


def test_all_that_is_missed_is_said():
    result = row(long("float32"), foo=[41.0] * 4, flash=[82.0] * 4)
    assert targets.verdict(result, None) == (
        "short of 0.82 x FMA peak by 50.0%; slower than flash by 50.0%"
    )


def test_ratios_are_taken_round_by_round():
    """A machine that gets slower slows all, and a contender may leave early."""
    result = row(long("float32"), foo=[80.0, 40.0, 20.0, 10.0], flash=[40.0, 20.0])
    result.references[peaks.FMA] = [90.0, 45.0, 22.5, 11.25]
    assert targets.fractions(result, peaks.FMA) == pytest.approx([8 / 9] * 4)
    assert targets.ratios(result.rates("foo"), result.rates("flash")) == pytest.approx([2.0] * 2)


def test_first_calls():
    def result(warm, cold):
        return Result("first call", "abs", 1, 0.0, True, {"warm": [warm] * 3, "cold": [cold] * 3})

    assert targets.first_call_verdict(result(0.049, 1.9)) == "reached"
    assert targets.first_call_verdict(result(0.06, 1.9)) == "warm longer than 50 ms"
    assert targets.first_call_verdict(result(0.04, 2.1)) == "cold longer than 2000 ms"


# ----------------------------------------------------------------------------------------- report


@pytest.fixture
def content(tmp_path):
    """A results file with a few rows of each table, written and read again."""
    square = [
        row(Workload(direction, dtype, mask, length, length, 64), threads, foo=[80.0] * 4,
            flash=[40.0, 20.0, 20.0])
        for direction in ("forward", "backward")
        for dtype in ("float32", "bfloat16")
        for mask in (False, True)
        for length in (512, 2048)
        for threads in (1, 2)
    ]  # fmt: skip
    decoding = [
        row(Workload("forward", "float32", False, 1, length, 128, 1, 32, 8), threads, peaks.READ,
            foo=[50.0] * 4, flash=[10.0] * 4)
        for length in (1024, 8192)
        for threads in (1, 2)
    ]  # fmt: skip
    others = [
        Result("peaks", peaks.FMA, 1, 1.0, True, {peaks.FMA: [1e-11, 1e-11, 2e-11]}),
        Result("peaks", peaks.BF16_DOT, 1, 0.0, True, failures={peaks.BF16_DOT: "no units"}),
        Result(
            "calls",
            "abs",
            1,
            0.0,
            False,
            {"foo": [2e-6] * 4, "torch": [1e-6] * 4, "torch.ops.aten": [4e-6] * 4},
        ),
        Result("first call", "abs", 1, 0.0, True, {"warm": [0.01], "cold": [1.0]}),
    ]
    results = [*square, *decoding, *others]
    path = tmp_path / "folder" / "results.json"
    report.save(path, results, "default")
    content = report.load(path)
    assert content.results == results
    return content


def table(content, section):
    header, *rows = report.table_of(content, section, content.by_section()[section])
    return [dict(zip(header, cells, strict=True)) for cells in rows]


def test_table_of_attention(content):
    first, second, *_ = table(content, "attention forward")
    assert first == {
        "case": "float32 dense",
        "threads": "1",
        "foo": "0.00",
        "of peak": "0.80 (0.80-0.80)",
        "target": "0.82",
        "one thread": "-",
        "flash": "0.00",
        "foo / best peer": "4.00 (3.00-4.00)",
        "verdict": "short of 0.82 x FMA peak by 2.4%",
    }
    assert second["one thread"] == "1.00 x"
    assert second["verdict"] == "short of 1.85 x one thread by 45.9%"


def test_other_tables(content):
    assert table(content, "peaks") == [
        {"case": "FMA peak", "threads": "1", "median": "100", "quartiles": "75.0-100"},
        {"case": "bf16 dot peak", "threads": "1", "median": "absent", "quartiles": "-"},
    ]
    assert table(content, "calls") == [
        {"case": "abs", "threads": "1", "foo": "2.00", "torch": "1.00", "torch.ops.aten": "4.00",
         "foo / torch": "2.00 (2.00-2.00)", "foo / torch.ops.aten": "0.50 (0.50-0.50)"},
    ]  # fmt: skip
    assert table(content, "first call") == [
        {"case": "abs", "threads": "1", "warm": "10.0", "cold": "1000", "verdict": "reached"}
    ]


def test_printed_tables_have_every_row_and_what_is_missing(content):
    printed = io.StringIO()
    report.print_tables(Console(width=200, file=printed), content)
    text = printed.getvalue()
    assert text.count("float32 dense") == 2 * 4 + 4
    assert report.tally(content) in text
    assert content.machine["processor"] in text
    assert "Not measured: bf16 dot peak: no units (1 rows)" in text


def test_lines_of_code(tmp_path):
    """Without what explains it; of a string in several lines all, if it is part of a statement."""
    file = tmp_path / "operator.py"
    file.write_text(
        '"""Docstring\n\nof a module."""\n\nimport math  # 1\n\n# a comment\n'
        'def f(x):  # 2\n    """Docstring."""\n    text = """3\n    4"""\n'
        "    return math.sin(  # 5\n\n        x,  # 6\n    )  # 7\n"
    )
    assert code_lines.count(file) == 7
    assert re.search(r": abs \d+, rms_norm \d+, silu_mul \d+, ", code_lines.report())


def test_tally_counts_verdicts():
    rows = [
        row(long("float32"), foo=[90.0] * 4, flash=[80.0] * 4),
        row(long("float32", True), foo=[50.0] * 4, flash=[40.0] * 4),
        row(long("bfloat16"), foo=[90.0] * 4, flash=[99.0] * 4),
        row(long("bfloat16", True), foo=[1.0] * 4, flash=[2.0] * 4),
        Result("calls", "abs", 1, 0.0, False, {"foo": [2e-6] * 4, "torch": [1e-6] * 4}),
    ]
    assert report.tally(report.Content("2026-01-01", "default", {}, rows)) == (
        "Of 4 rows of attention, 1 reach all that is asked of them; in 2 a peer is faster."
    )


def test_readme_has_the_headlines_between_its_marks(content, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before {report.BEGIN} of yesterday {report.END} after")
    report.rewrite_readme(readme, content, {"images/plot.png": "A plot"})
    text = readme.read_text()
    assert text.startswith(f"before {report.BEGIN}")
    assert text.endswith(f"{report.END} after")
    assert "of yesterday" not in text
    assert "![A plot](images/plot.png)" in text
    # Lengths and decoding, on one thread each: four in either direction, and two.
    assert text.count("| float32 dense | 0.00 |") == 6
    assert "| float32 dense | 0.00 | 0.80 | 0.82 | 1.00 x | flash 0.00 | 4.00 (3.00-4.00) |" in text
    assert report.tally(content) in text
    assert report.SECTIONS["calls"].title not in text
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="must have the marks"):
        report.rewrite_readme(readme, content, {})


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234")]
)
def test_numbers_have_three_digits(value, text):
    assert report.number(value) == text


def test_plots_show_every_contender(content, tmp_path):
    descriptions = plots.save_plots(content, tmp_path / "plots")
    assert set(descriptions) == {"attention_speed_64.png", "attention_decoding.png"}
    for name in descriptions:
        pixels = matplotlib.image.imread(tmp_path / "plots" / name)[..., :3]
        for contender in ("foo", "flash"):
            wanted = matplotlib.colors.to_rgb(plots.COLORS[contender])
            assert np.isclose(pixels, wanted, atol=0.01).all(axis=2).sum() > 100, contender
        math = matplotlib.colors.to_rgb(plots.COLORS["math"])
        assert not np.isclose(pixels, math, atol=0.01).all(axis=2).any()


def test_plots_of_nothing(tmp_path):
    content = report.Content("2026-01-01", "quick", {}, [])
    assert plots.save_plots(content, tmp_path) == {}


# ---------------------------------------------------------------------------------- command line


def test_quick_run(monkeypatch, tmp_path, capsys):
    """The whole path, with one row of attention."""
    monkeypatch.setattr(
        cases, "cases", lambda sizes, processors: [cases.attention_case(FORWARD, (1,))]
    )
    monkeypatch.setattr(attention, "contenders", lambda it: {"foo": lambda: attention.ours(it)})
    monkeypatch.setattr(peaks, "_beyond_the_caches", lambda: torch.ones(1 << 16))
    monkeypatch.setitem(
        command.MODES, "quick", dataclasses.replace(command.MODES["quick"], first_calls=())
    )
    results = tmp_path / "latest.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", "--output", str(results)])
    command.main()
    printed = capsys.readouterr().out
    assert "float32, causal, 8 x 16, S 128" in printed
    assert f"Written: {results}" in printed
    assert [it.section for it in report.load(results).results][-1] == "attention forward"
    with pytest.raises(SystemExit, match="is from a quick run"):
        command.write_readme(results)
    report.save(results, report.load(results).results, "default")
    with pytest.raises(SystemExit, match=r"no rows of calls, abs, .*: run all of `make bench`"):
        command.write_readme(results)
    with pytest.raises(SystemExit, match="does not exist: run `make bench` first"):
        command.write_readme(tmp_path / "none.json")


def test_some_sections_alone(monkeypatch, tmp_path):
    measured = []
    monkeypatch.setattr(
        command, "measure", lambda case, limits: measured.append(case.section) or []
    )
    monkeypatch.setattr(command, "measure_first_calls", lambda *_: pytest.fail("not asked for"))
    monkeypatch.setattr(peaks, "SECONDS", 1e-4)
    monkeypatch.setattr(peaks, "_beyond_the_caches", lambda: torch.ones(1 << 16))
    path = tmp_path / "latest.json"
    arguments = ["--only", "peaks", "attention-options", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", *arguments])
    command.main()
    assert set(measured) == {"attention options"}
    assert {it.section for it in report.load(path).results} == {"peaks"}


def test_readme_and_images(monkeypatch, tmp_path, content):
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}{report.END}")
    monkeypatch.setattr(command, "REPOSITORY", tmp_path)
    monkeypatch.setattr(command, "README", readme)
    monkeypatch.setattr(command, "IMAGES", tmp_path / "docs" / "images")
    monkeypatch.setattr(
        report, "SECTIONS", {name: report.SECTIONS[name] for name in content.by_section()}
    )
    command.write_readme(tmp_path / "folder" / "results.json")
    for name in ("attention_speed_64.png", "attention_decoding.png"):
        assert (tmp_path / "docs" / "images" / name).is_file()
        assert f"](docs/images/{name})" in readme.read_text()


def test_default_cases_have_every_row_that_was_promised():
    found = cases.cases(cases.DEFAULT, processors=2)
    names = [(case.section, case.name) for case in found]
    assert len(set(names)) == len(names)
    square = {
        (w.direction, w.dtype, w.is_causal, w.query_length, w.head_dim)
        for case in found
        if (w := case.workload) and w.is_plain and w.query_heads == w.key_heads == 8
    }
    assert square == set(
        itertools.product(
            ("forward", "backward"),
            ("float32", "bfloat16", "float16"),
            (False, True),
            (128, 512, 2048),
            (64, 128),
        )
    )
    attention_cases = [case for case in found if case.workload]
    assert all(case.threads == (1, 2) for case in attention_cases)
    options = [case for case in attention_cases if case.section == "attention options"]
    assert len(options) == len(cases.OPTIONS) * 2 * 2
    decoded = {
        (it.workload.dtype, it.workload.key_length, it.workload.heads, it.workload.head_dim)
        for it in attention_cases
        if it.workload.is_decoding
    }
    assert {("float32", 8192, "32/8", 128), ("bfloat16", 8192, "32/8", 128)} < decoded
    assert all(case.threads == (1,) for case in cases.cases(cases.QUICK, processors=1))
