"""The benchmark judges correctly, and its tables, plots and README give the measurements."""

import dataclasses
import io
import re

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import (
    code_lines,
    device,
    models,
    peaks,
    plots,
    publish,
    report,
    results_file,
    targets,
)
from benchmarks.measure import Result
from benchmarks.workload import Workload

# ---------------------------------------------------------------------------------------- targets


def test_verdict_of_a_device_row():
    def verdict(*seconds):
        seconds = {"foo": list(seconds), "cpu": [1.0] * len(seconds)}
        return targets.device_verdict(Result("device", device.TRAINING, 1, 0.0, True, seconds))

    assert verdict(0.9, 1.0, 1.1) == "reached"
    assert verdict(0.9, 1.01, 1.02, 1.03) == "level with the limit"
    assert verdict(1.1, 1.2, 1.3) == "longer by 20.0%"


def row(workload, threads=1, peak=peaks.FMA, **rates):
    """Make a result whose contenders and references have these rates in each of four rounds."""
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
    """A machine that slows down affects all, and a contender may leave early."""
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
    """Write a results file with a few rows of each table, and read it again."""
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
    results_file.save(path, results, "default")
    content = results_file.load(path)
    assert content.results == results
    return content


def test_other_tables_of_this_machine_stay(content, monkeypatch, tmp_path):
    path = tmp_path / "results.json"
    results_file.save(path, content.results, "default")
    again = [dataclasses.replace(content.by_section()["calls"][0], name="anew")]
    results_file.save(path, again, "default")
    kept = [it for it in content.results if it.section != "calls"]
    assert results_file.load(path).results == [*kept, *again]

    results_file.save(path, again, "quick")
    assert results_file.load(path).results == again
    monkeypatch.setattr(results_file, "machine_facts", lambda: {**content.machine, "torch": "9"})
    results_file.save(path, content.results[:1], "quick")
    assert results_file.load(path).results == content.results[:1]


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
    """Comments and docstrings do not count; all lines of a string in a statement do."""
    file = tmp_path / "operator.py"
    file.write_text(
        '"""Docstring\n\nof a module."""\n\nimport math  # 1\n\n# a comment\n'
        'def f(x):  # 2\n    """Docstring."""\n    text = """3\n    4"""\n'
        "    return math.sin(  # 5\n\n        x,  # 6\n    )  # 7\n"
    )
    assert code_lines.count(file) == 7
    assert re.search(
        r": abs \d+, rms_norm \d+, layer_norm \d+, silu_mul \d+, ", code_lines.report()
    )


def test_tally_counts_verdicts():
    rows = [
        row(long("float32"), foo=[90.0] * 4, flash=[80.0] * 4),
        row(long("float32", True), foo=[50.0] * 4, flash=[40.0] * 4),
        row(long("bfloat16"), foo=[90.0] * 4, flash=[99.0] * 4),
        row(long("bfloat16", True), foo=[1.0] * 4, flash=[2.0] * 4),
        Result("calls", "abs", 1, 0.0, False, {"foo": [2e-6] * 4, "torch": [1e-6] * 4}),
    ]
    assert report.tally(results_file.Content("2026-01-01", "default", {}, rows)) == (
        "Of 4 rows of attention, 1 reach all that is asked of them; in 2 a peer is faster."
    )


def of_model(name, *speeds, **others):
    """Make a model's row with these speedups by `apply`, one per round."""
    seconds = {"foo": [1 / it for it in speeds], "torch": [1.0] * len(speeds), **others}
    return Result(models.SECTION, name, 2, 768.0, True, seconds)


def test_models_that_apply_makes_slower_are_named():
    def line(*results):
        return report.slower(results_file.Content("2026-01-01", "default", {}, list(results)))

    fast = of_model("Llama prefill, bfloat16", 1.5, 1.6, 0.5, compiled=[1e-3] * 3)
    level = of_model("Llama decoding, float32", 0.9, 0.971, 1.2)
    assert line(fast, level) == "apply makes slower:"
    slow = of_model("Llama prefill, float32", 0.85, 0.84, 1.1)
    slower = dataclasses.replace(of_model("BERT 2 x 256, float32", 0.969), threads=1)
    assert line(fast, slow, level, slower) == (
        "apply makes slower: Llama prefill, float32 (2 threads) 0.850; "
        "BERT 2 x 256, float32 (1 thread) 0.969"
    )
    failed = Result(models.SECTION, "no peer", 2, 1.0, True, {"foo": [1.0]}, failures={"torch": ""})
    assert line(failed) == "apply makes slower:"
    assert line(dataclasses.replace(slow, section="linear")) == ""


def test_tables_have_the_headlines(content):
    text = publish.tables(content, {"images/plot.png": "A plot"})
    assert "![A plot](images/plot.png)" in text
    # Lengths and decoding, on one thread each: four in either direction, and two.
    assert text.count("| float32 dense | 0.00 |") == 6
    assert "| float32 dense | 0.00 | 0.80 | 0.82 | 1.00 x | flash 0.00 | 4.00 (3.00-4.00) |" in text
    assert report.tally(content) in text
    assert report.SECTIONS["calls"].title not in text


def test_the_front_page_names_where_a_peer_is_faster():
    def of_forward(name, foo, flash):
        seconds = {"foo": [foo] * 4, "flash": [flash] * 4}
        return Result("attention forward", name, 1, 1e9, False, seconds)

    rows = [of_forward("quick", 1.0, 3.0), of_forward("slow", 2.0, 1.0)]
    content = results_file.Content("2026-01-01", "default", {}, rows)
    header, row = publish.summary(content)
    assert row == ["attention", "2", "1.75", "0.50 to 3.00", "slow (1 thread)"]
    assert len(header) == len(row)
    alone = results_file.Content("2026-01-01", "default", {}, rows[:1])
    assert publish.summary(alone)[1][-1] == "none"
    many = [of_forward(f"slow {number}", 2.0, 1.0) for number in range(5)]
    named = publish.summary(results_file.Content("2026-01-01", "default", {}, many))[1][-1]
    assert named.endswith("slow 2 (1 thread), and 2 more")


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
    content = results_file.Content("2026-01-01", "quick", {}, [])
    assert plots.save_plots(content, tmp_path) == {}


def test_pages_and_images(monkeypatch, tmp_path, content):
    docs = tmp_path / "docs"
    places = publish.Published(
        tmp_path / "README.md", docs / "performance.md", docs / "images", index=docs / "index.md"
    )
    docs.mkdir()
    for page in (places.readme, places.performance, places.index):
        page.write_text("<!-- figures: begin --><!-- figures: end -->")
    monkeypatch.setattr(
        report, "SECTIONS", {name: report.SECTIONS[name] for name in content.by_section()}
    )
    command.publish_figures(
        tmp_path / "folder" / "results.json", places, [command.dashed(it) for it in report.SECTIONS]
    )
    for name in ("attention_speed_64.png", "attention_decoding.png"):
        assert (places.images / name).is_file()
        assert f"](images/{name})" in places.performance.read_text()
    assert "](docs/images/attention_speed_64.png)" in places.readme.read_text()
    assert "](images/attention_speed_64.png)" in places.index.read_text()
    for page in (places.readme, places.index):
        assert "| attention | " in page.read_text()


def test_layers_that_torch_does_not_have():
    """PyTorch has no product with 8-bit integers in groups."""
    times = {"foo": [1e-3] * 3, "F.linear": [2e-3] * 3}
    row = Result(
        *("quantized linear of one row", "int8 in groups of 32, float32, 1 x 4096 x 4096", 1),
        *(1e7, False, times, {peaks.READ: [2e10] * 3}),
    )
    content = results_file.Content("2026-01-01", "default", {}, [row])
    header, cells = report.table_of(content, row.section, [row])
    found = dict(zip(header, cells))
    assert (found["foo"], found["torch"], found["F.linear"]) == ("10.0", "-", "5.00")
    assert found["foo / torch"] == "-"
