"""The benchmark runs threads at once, and reports when two of them share one core."""

import io
import os

import pytest
from rich.console import Console

from benchmarks import cores, device, operators, peaks, publish, report, results_file
from benchmarks.measure import Result
from benchmarks.workload import Workload

SENTENCE = (
    "This machine gives two threads one core only (its processors are threads of the same core): "
    "the FMA peak is 246 GFLOP/s on one thread and 249 on two. Rows of two threads cannot be "
    "judged."
)


def peak(threads, *rates):
    return Result("peaks", peaks.FMA, threads, 1.0, True, {peaks.FMA: [1e-9 / it for it in rates]})


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Pretend that there are two processors, and provide an empty folder in place of /sys."""
    monkeypatch.setattr(cores, "SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_siblings(machine, lists):
    for processor, text in enumerate(lists):
        path = f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        write(machine / path, f"{text}\n")


# ------------------------------------------------------------------------------------------ cores


def test_one_core_is_told_by_the_rates_of_two_threads(machine):
    write_siblings(machine, ["0-1", "0-1"])
    one = peak(1, 240, 246, 247)
    assert cores.one_core([one, peak(2, 249, 249, 480)], peaks.FMA) == SENTENCE
    assert cores.one_core([one, peak(2, 480, 249, 490)], peaks.FMA) == ""
    assert cores.one_core([one], peaks.FMA) == ""
    assert cores.one_core([peak(2, 249, 249, 480)], peaks.FMA) == ""
    reading = Result("bandwidth", peaks.READ, 2, 1.0, True, {peaks.READ: [1.0]})
    assert cores.one_core([one, reading], peaks.FMA) == ""


def test_reasons(machine):
    other = "the system shows more, as virtual machines do whose processors are threads of one core"
    assert cores.reason() == other
    write_siblings(machine, ["0", "1"])
    assert cores.reason() == other
    write_siblings(machine, ["0-1", "0-1"])
    assert cores.reason() == "its processors are threads of the same core"
    write(machine / "fs/cgroup/cpu.max", "150000 100000\n")
    assert cores.reason() == "its control group may use 1.5 processors"
    write(machine / "fs/cgroup/cpu.max", "max 100000\n")
    assert cores.reason() == "its processors are threads of the same core"


def test_quota_of_older_systems(machine):
    assert cores.processors_allowed() is None
    write(machine / "fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n")
    write(machine / "fs/cgroup/cpu/cpu.cfs_period_us", "50000\n")
    assert cores.processors_allowed() == 2
    write(machine / "fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert cores.processors_allowed() is None


def test_threads_get_cores_of_their_own_first(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    assert cores.processors_by_core() == [0, 1, 2, 3]
    write_siblings(machine, ["0-1", "0-1", "2-3", "2-3"])
    assert cores.processors_by_core() == [0, 2, 1, 3]


# ------------------------------------------------------------------------------------------ clock


def attempts(monkeypatch, *given):
    """Replace the runs of threads: give each attempt's start and end times."""
    left = list(given)
    monkeypatch.setattr(peaks, "at_once", lambda run, threads, pool: left.pop(0))
    return left


def test_a_thread_that_starts_late_is_not_counted(monkeypatch):
    late, together = ([0.0, 1.0], [1.0, 2.0]), ([5.0, 5.05], [6.0, 6.05])
    left = attempts(monkeypatch, late, late, together, late)
    assert peaks.timed(None, 2) == pytest.approx(1.05)
    assert left == [late]


def test_the_best_of_attempts_counts_where_none_is_good(monkeypatch):
    late, better = ([0.0, 1.0], [1.0, 2.0]), ([0.0, 0.5], [1.0, 1.5])
    left = attempts(monkeypatch, late, better, *[late] * peaks.ATTEMPTS)
    assert peaks.timed(None, 2) == pytest.approx(1.5)
    assert len(left) == 2


def test_threads_stay_on_processors_of_their_own():
    usable, seen = os.sched_getaffinity(0), {}

    def run(thread):
        seen[thread] = os.sched_getaffinity(0)
        # Long enough to run beside the other thread.
        sum(range(100_000))

    threads = min(2, len(usable))
    assert peaks.timed(run, threads) > 0
    assert all(len(processors) == 1 for processors in seen.values())
    assert len(set.union(*seen.values())) == threads
    assert os.sched_getaffinity(0) == usable


# ----------------------------------------------------------------------------------------- report


def content_of(one_core):
    workload = Workload("forward", "float32", False, 512, 512, 64)
    references = {peaks.FMA: [100.0] * 4}
    rows = [
        Result("attention forward", "one", threads, 100.0, True, {"foo": [1.0] * 4},
               references, workload=workload)
        for threads in (1, 2)
    ]  # fmt: skip
    others = [
        Result(operators.SECTION, "sum", 2, 1.0, True, {"foo": [2.0] * 4, "torch": [1.0] * 4}),
        Result(device.SECTION, device.TRAINING, 2, 0.0, True, {"foo": [2.0], device.CPU: [1.0]}),
    ]
    machine = dict.fromkeys(results_file.machine_facts(), "known")
    return results_file.Content("2026-01-01", "default", machine, [*rows, *others], one_core)


def verdicts(content):
    return {
        section: [cells[-1] for cells in report.table_of(content, section, rows)[1:]]
        for section, rows in content.by_section().items()
    }


def test_rows_of_two_threads_are_not_judged_on_one_core():
    assert verdicts(content_of("")) == {
        operators.SECTION: ["slower than torch by 50.0%"],
        device.SECTION: ["longer by 100.0%"],
        "attention forward": ["reached", "short of 1.85 x one thread by 45.9%"],
    }
    content = content_of(SENTENCE)
    assert verdicts(content) == {
        operators.SECTION: [report.NOT_JUDGED],
        device.SECTION: [report.NOT_JUDGED],
        "attention forward": ["reached", report.NOT_JUDGED],
    }
    assert report.tally(content).startswith("Of 1 rows of attention, 1 reach all")


def test_tables_and_readme_say_that_there_is_one_core():
    for one_core, count in (("", 0), (SENTENCE, 1)):
        printed = io.StringIO()
        content = content_of(one_core)
        report.print_tables(Console(width=1000, file=printed), content)
        assert printed.getvalue().count(SENTENCE) == count
        assert publish.tables(content, {}).count(SENTENCE) == count


def test_results_files_keep_the_sentence(tmp_path):
    for one_core in ("", SENTENCE):
        results_file.save(tmp_path / "results.json", [], "quick", one_core)
        assert results_file.load(tmp_path / "results.json").one_core == one_core
