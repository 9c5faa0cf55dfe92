"""The benchmark's workloads, contenders and command line run, on tiny sizes."""

import dataclasses
import importlib.util
import itertools
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near

from benchmarks import __main__ as command
from benchmarks import (
    attention,
    cases,
    experts,
    linear_cross_entropy,
    models,
    peaks,
    quantized_linear,
    report,
    results_file,
    targets,
    zentorch_process,
)
from benchmarks.measure import Case, Limits, Result, measure, prepare
from benchmarks.own_process import OwnProcess
from benchmarks.publish import Published
from benchmarks.workload import Workload

TINY = Limits(rounds=3, turn=1e-4, contender=1e-3)
HAS_ZENTORCH = importlib.util.find_spec("zentorch") is not None
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
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
        # Sequences of 2, 5 and 7 of the 25 positions, and the rest.
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


# ------------------------------------------------------------------------------------- contenders


def left_out(workload):
    raise RuntimeError("left out")


@pytest.mark.whole
def test_every_contender_of_a_tiny_forward_pass(fresh_compiler, monkeypatch):
    """A contender with another result would be missing."""
    workload = dataclasses.replace(FORWARD, query_length=512, key_length=512)
    (result,) = measure(cases.attention_case(workload, (1,)), TINY)
    assert result.peers() == ["flash", "math", "flex"] + ["zentorch"] * HAS_ZENTORCH
    assert set(result.failures) == (set() if HAS_ZENTORCH else {"zentorch"})
    assert all(second > 0 for seconds in result.seconds.values() for second in seconds)
    assert len(result.references[peaks.FMA]) == TINY.rounds


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 32), (4, 32)])
def test_every_contender_of_a_quantized_layer(bits, group_size):
    """Missing packages are named; a contender with another result would be missing."""
    layer = quantized_linear.Layer("bfloat16", 64, 128, 64, bits, group_size)
    case = Case(layer.name, "", partial(quantized_linear.contenders, layer), (1,))
    (result,) = measure(case, TINY)
    torchao = {"torchao"} if group_size is None else set()
    expected = {"F.linear"} | (torchao if HAS_TORCHAO else set())
    # torch has no kernel for groups of 8 bits.
    expected |= set() if (bits, group_size) == (8, 32) else {"torch"}
    assert set(result.peers()) == expected
    assert set(result.failures) == (set() if HAS_TORCHAO else torchao)


def test_every_quantized_layer_agrees_with_its_peers(monkeypatch):
    """A layer whose peers all have other results ends the run."""
    monkeypatch.setattr(peaks, "bytes_beyond_the_caches", lambda: 0)
    for layer in quantized_linear.layers(["bfloat16", "float32"]):
        tiny = dataclasses.replace(layer, width=128, outputs=64)
        case = Case(tiny.name, "", partial(quantized_linear.contenders, tiny), (1,))
        contenders, failures = prepare(case)
        assert "F.linear" in contenders, (tiny, failures)


@pytest.mark.parametrize("options", cases.OPTIONS, ids=str)
@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_every_option(options, direction, monkeypatch):
    """Each contender does the same work as ours, or it would be missing."""
    monkeypatch.setattr(attention, "flex", left_out)
    dense = Workload(direction, "float32", False, 256, 256, 64)
    case = cases.attention_case(dataclasses.replace(dense, **options), (1,))
    (result,) = measure(case, TINY)
    assert result.section == "attention options"
    has_flash = "window" in options or "is_packed" in options
    has_zentorch = HAS_ZENTORCH and has_flash and direction == "forward"
    assert result.peers() == ["flash"] * has_flash + ["math"] + ["zentorch"] * has_zentorch
    assert targets.requirements(result, None) == []


@pytest.mark.parametrize("options", [{"window": 128}, {"is_packed": True}], ids=str)
def test_flex_sees_what_ours_sees(options):
    workload = Workload("forward", "float32", True, 300, 300, 64, **options)
    seen = torch.full((300, 300), -torch.inf, dtype=torch.float64)
    seen[attention.mask_mod(workload)(0, 0, torch.arange(300)[:, None], torch.arange(300))] = 0
    exact = [tensor.double() for tensor in workload.inputs()[0]]
    expected = (
        attention.with_batch(lambda *it: F.scaled_dot_product_attention(*it, seen))(*exact)
        if workload.is_packed
        else F.scaled_dot_product_attention(*exact, seen)
    )
    assert_near(attention.ours(workload).function(), expected)


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
    """Every kind is measured, except contenders that compile or start a process."""
    for name in ("flex", "Zentorch"):
        monkeypatch.setattr(attention, name, left_out)
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


def test_own_process():
    """Results and exceptions come back, until the process ends."""
    process = OwnProcess("builtins:list")
    process.request("append", 3)
    assert process.request("pop") == 3
    with pytest.raises(IndexError, match="pop from empty list"):
        process.request("pop")
    ended = OwnProcess("sys:exit")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^the process of sys:exit has ended$"):
            ended.request("pop")


def test_zentorch_stays_out_of_this_process():
    assert "zentorch" not in sys.modules


def test_small_rows_of_other_sections():
    peers = {"calls": ["torch", "torch.ops.aten"], "abs": ["torch"]}
    for case in itertools.chain(cases.call_cases(), cases.abs_cases([100], 1)):
        (result,) = measure(case, TINY)
        expected = peers[case.section]
        if "formula" in case.name:
            expected = ["torch", "torch.library", "torch.library.custom_op"]
        elif "backward" in case.name:
            expected = [*expected, "torch.library.custom_op"]
        assert result.peers() == expected


def test_every_way_to_the_loss_of_a_layer(monkeypatch, fresh_compiler):
    """A contender with another loss or gradient would be missing."""
    monkeypatch.setattr(linear_cross_entropy, "WIDTH", 16)
    peers = ["linear, softmax_cross_entropy", "torch", "torch in chunks"]
    for case in linear_cross_entropy.cases(5, [70], ["float32"], [1]):
        (result,) = measure(case, TINY)
        is_time = case.section == linear_cross_entropy.SECTION
        assert result.peers() == peers + ["compiled"] * is_time


def test_rows_of_models():
    """Each kind of model, phase and dtype has its row, beside the model itself."""
    found = {it.name: it for it in models.cases(models.QUICK, 2)}
    phases = [*(f"Llama {it}" for it in models.PHASES), "BERT 2 x 16", "BERT 1 x 32"]
    expected = [*phases, "BERT training step, 2 x 16"]
    names = {f"{it}, {dtype}" for it in expected for dtype in models.DTYPES}
    names |= {f"{kind} {it}, bfloat16" for kind in models.MIXTURES for it in models.PHASES}
    names |= {"Llama decoding, GGUF Q4_0"}
    assert set(found) == names
    every = cases.cases(cases.DEFAULT, (1, 2))
    defaults = [it.name for it in every if it.section == models.SECTION]
    assert {"BERT 8 x 128, float32", "BERT 2 x 256, bfloat16"} <= set(defaults)
    for name in ("BERT 2 x 16, float32", "BERT training step, 2 x 16, bfloat16"):
        (result,) = measure(found[name], TINY)
        assert result.peers() == [models.AS_IT_IS]
        assert result.work == 32
    for name in ("gpt-oss decoding, bfloat16", "Qwen3-MoE training step, bfloat16"):
        (result,) = measure(found[name], TINY)
        assert result.peers() == [models.AS_IT_IS]


def test_row_of_a_gguf_file():
    pytest.importorskip("gguf")
    (result,) = measure(models.gguf_case(models.QUICK, 2), TINY)
    assert models.AS_IT_IS in result.peers()


# ---------------------------------------------------------------------------------- command line


def test_quick_run(monkeypatch, tmp_path, capsys):
    """The whole command runs, with one row of attention."""
    monkeypatch.setattr(
        cases, "cases", lambda sizes, *counts: [cases.attention_case(FORWARD, (1,))]
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
    assert [it.section for it in results_file.load(results).results][-1] == "attention forward"
    with pytest.raises(SystemExit, match="is from a quick run"):
        command.publish_figures(
            results, Published(), [command.dashed(it) for it in report.SECTIONS]
        )
    results_file.save(results, results_file.load(results).results, "default")
    with pytest.raises(SystemExit, match=r"no rows of calls, abs, .*: run all of `make bench`"):
        command.publish_figures(
            results, Published(), [command.dashed(it) for it in report.SECTIONS]
        )
    with pytest.raises(SystemExit, match="does not exist: run `make bench` first"):
        command.publish_figures(
            tmp_path / "none.json", Published(), [command.dashed(it) for it in report.SECTIONS]
        )


def test_efficiency_on_chosen_numbers_of_threads(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command.info, "usable_processors", lambda: 4)
    monkeypatch.setattr(command, "measure", fake_measurement)
    monkeypatch.setattr(peaks, "measure_peaks", lambda counts, rounds: [])
    monkeypatch.setattr(command, "one_core", lambda *_: "")
    arguments = ["--only", "models", "--output", str(tmp_path / "it.json")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--threads", "4,1,2", "--quick", *arguments])
    command.main()
    printed = capsys.readouterr().out
    assert "efficiency of threads" in " ".join(printed.split())
    rows = [
        line.split("│")[2:-1] for line in printed.splitlines() if "BERT 2 x 16, float32" in line
    ]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert ["foo", "32.0", "48.0 (0.75)", "64.0 (0.50)"] in cells
    assert [models.AS_IT_IS, "16.0", "16.0 (0.50)", "16.0 (0.25)"] in cells


def fake_measurement(case, limits):
    """Two threads take two thirds of the time with foo, four half of it; peers as long as one."""
    ours = {1: 1.0, 2: 1 / 1.5, 4: 0.5}
    return [
        Result(
            *(case.section, case.name, threads, 32.0, False),
            {"foo": [ours[threads]] * 3, models.AS_IT_IS: [2.0] * 3},
        )
        for threads in case.threads
    ]


@pytest.mark.parametrize("text", ["0", "1,5", "-1", "two", ""])
def test_numbers_of_threads_that_there_are_not(monkeypatch, capsys, text):
    monkeypatch.setattr(command.info, "usable_processors", lambda: 4)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--threads", text])
    with pytest.raises(SystemExit):
        command.parse_options()
    assert "argument --threads: " in capsys.readouterr().err


def test_some_sections_alone(monkeypatch, tmp_path):
    measured = []
    monkeypatch.setattr(
        command, "measure", lambda case, limits: measured.append(case.section) or []
    )
    monkeypatch.setattr(command, "measure_first_calls", lambda *_: pytest.fail("measured uncalled"))
    monkeypatch.setattr(peaks, "SECONDS", 1e-4)
    monkeypatch.setattr(peaks, "_beyond_the_caches", lambda: torch.ones(1 << 16))
    path = tmp_path / "latest.json"
    arguments = ["--only", "peaks", "attention-options", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", *arguments])
    command.main()
    assert set(measured) == {"attention options"}
    assert {it.section for it in results_file.load(path).results} == {"peaks"}


def test_default_cases_have_every_row_that_was_promised():
    found = cases.cases(cases.DEFAULT, (1, 2))
    names = [(case.section, case.name) for case in found]
    assert len(set(names)) == len(names)
    square = {
        (w.direction, w.dtype, w.is_causal, w.query_length, w.head_dim)
        for case in found
        if (w := case.workload) and w.has_no_options and w.query_heads == w.key_heads == 8
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
    assert all(case.threads == (1,) for case in cases.cases(cases.QUICK, (1,)))


@pytest.mark.parametrize("trains", [False, True])
def test_experts_of_all_ways_agree(trains):
    layer = experts.Layer("float32", 5, trains, experts=4, top_k=2, width=64, intermediate=64)
    contenders = experts.contenders(layer)
    assert {"eager", "batched_mm", "grouped_mm"} < contenders.keys()
    expected, *others = [make().results() for make in contenders.values()]
    for results in others:
        for result, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", experts.BITS)
def test_experts_that_are_read_agree(kind, monkeypatch):
    monkeypatch.setattr(experts.peaks, "bytes_beyond_the_caches", lambda: 2**20)
    layer = experts.Layer("float32", 2, experts=4, top_k=2, width=64, intermediate=64)
    contenders = experts.reading(layer, kind)
    results = []
    for make in contenders.values():
        contender = make()
        results.append([contender.results()[0] for _ in range(9)])
    for result, exact in zip(*results, strict=True):
        torch.testing.assert_close(result, exact, rtol=2e-3, atol=2e-3)


def test_experts_that_copy_too_much_are_left_out(monkeypatch):
    layer = experts.Layer("float32", 5, experts=4, top_k=2, width=64, intermediate=64)
    monkeypatch.setattr(experts, "MOST_COPIES", experts.copied_bytes(layer) - 1)
    assert "batched_mm" not in experts.contenders(layer)
