"""Conformance runs for any device: results found, kept and shown."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from support.processes import module, python, start

from foo_ops.testing.conformance import comparison
from foo_ops.testing.conformance.scores import Report, Worker, cause_of, read_known, read_scores

REPOSITORY = Path(__file__).parents[2]
CASES = "^operators/(erfinv|cosh|sinc|neg)/float64"


CONFORMANCE = module("foo_ops.testing.conformance")


def conformance(*options, **environment):
    return python(CONFORMANCE, "--processes", 1, *options, **environment)


def test_faults_are_found_and_a_crash_costs_one_case(tmp_path):
    out, page, known = tmp_path / "scores.json", tmp_path / "page.md", tmp_path / "known.txt"
    known.write_text("# comment\noperators/sinc: not yet\n")
    options = ["--device", "cpu", "--import", "support.faulty_operators", "--only", CASES]
    options += ["--out", str(out), "--page", str(page), "--known", str(known)]
    result = conformance(*options)
    assert result.returncode == 1, result.stderr
    cases = json.loads(out.read_text())["cases"]
    assert sorted(cases) == [f"operators/{it}/float64" for it in ("cosh", "erfinv", "neg", "sinc")]
    assert cases["operators/neg/float64"] is None
    assert cases["operators/cosh/float64"] == "the process ended with 3"
    assert "not close" in cases["operators/erfinv/float64"]
    assert "sinc is not there" in cases["operators/sinc/float64"]
    assert "operators          4       1       2       1" in result.stdout
    text = page.read_text()
    assert "| operators | 4 | 1 | 2 | 1 |" in text
    assert "- **crashed**: 1 cases of `operators/cosh`" in text
    assert "- **other values**: 1 cases of `operators/erfinv`" in text
    assert "- `operators/sinc/float64`: not yet" in text

    # Cases in the file are not run again.
    kept = json.loads(out.read_text())
    kept["cases"] = {"operators/erfinv/float64": None, "operators/neg/float64": "of before"}
    out.write_text(json.dumps(kept))
    result = conformance(*options, "--skip", "cosh")
    cases = json.loads(out.read_text())["cases"]
    assert cases["operators/neg/float64"] == "of before"
    assert cases["operators/erfinv/float64"] is None
    assert "sinc is not there" in cases["operators/sinc/float64"]
    assert "operators/cosh/float64" not in cases
    assert "FAILED operators/neg/float64: of before" in result.stdout

    result = conformance("--device", "foo", "--only", "nothing", "--out", str(out))
    assert result.returncode == 1
    assert f"{out} must be a file of device foo to be resumed, got cpu" in result.stderr


@pytest.mark.whole
def test_results_that_have_lost_digits_on_the_cpu_too():
    """The CPU is off by 1e-5: so another device may be, and not by much more."""
    expected = [torch.tensor([0.5, float("nan")]), 3, torch.tensor([7])]
    exact = [it.double() - 1e-5 if isinstance(it, torch.Tensor) else it for it in expected]

    def compare_with(error, exact):
        comparison.compare([expected[0] + error, *expected[1:]], expected, "a sum", exact=exact)

    with pytest.raises(AssertionError, match="a sum: Tensor-likes are not close"):
        compare_with(3e-5, None)
    compare_with(3e-5, lambda: exact)
    with pytest.raises(AssertionError, match="a sum: Tensor-likes are not close"):
        compare_with(6e-5, lambda: exact)
    with pytest.raises(AssertionError, match="a sum: Tensor-likes are not equal"):
        comparison.compare(torch.tensor([8]), expected[2], "a sum", exact=lambda: exact[2])


def test_another_device_runs_without_foo(tmp_path):
    """foo would take torch's only key for third-party devices."""
    (tmp_path / "no_foo.py").write_text(
        "import sys, torch\n"
        "assert 'foo_ops._C' not in sys.modules\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
    )
    result = conformance(
        *("--device", "cpu", "--import", "no_foo", "--only", "operators/neg/float32"),
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(tmp_path)]),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert result.returncode == 0, result.stderr + result.stdout


@pytest.mark.whole
def test_interrupted_in_a_case(tmp_path):
    """Ctrl-C reaches all processes of a terminal; the interrupted case is not a crash."""
    out, begun = tmp_path / "scores.json", tmp_path / "begun"
    (tmp_path / "endless.py").write_text(
        "import pathlib, time, torch\n"
        "def cosh(*args, **kwargs):\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n"
        "    time.sleep(600)\n"
        "torch.cosh = cosh\n"
    )
    of_before = {"operators/neg/float64": None}
    out.write_text(json.dumps({"device": "cpu", "torch": torch.__version__, "cases": of_before}))
    running = start(
        *(CONFORMANCE, "--device", "cpu", "--import", "endless", "--processes", 1, "--out", out),
        *("--only", "^operators/(acos|cosh)/float64"),
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(tmp_path)]),
    )
    end = time.monotonic() + 300
    while not begun.exists() and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGINT)
    ended = running.wait(100)
    assert ended.returncode == 1
    assert ended.stderr.strip().endswith("conformance: interrupted after 1 of 2 cases")
    assert json.loads(out.read_text())["cases"] == of_before | {"operators/acos/float64": None}


@pytest.mark.whole
def test_a_worker_that_ended_between_two_cases():
    worker = Worker("cpu", [])
    worker.cases()
    worker.interrupt()
    worker._process.wait()
    assert worker.run(("operators", "neg", "float64")) == "the process ended with -9"
    assert worker.run(("operators", "neg", "float64")) is None
    worker.stop()


@pytest.mark.parametrize("option", ["--only", "--skip"])
def test_a_pattern_that_is_none(option):
    result = conformance("--device", "cpu", option, "*/add")
    assert result.returncode == 2
    message = "must be a regular expression, got '*/add': nothing to repeat at position 0"
    assert f"error: argument {option}: {message}" in result.stderr


def test_no_case_is_left():
    result = conformance("--device", "cpu", "--only", "^operators/nothing/")
    assert result.returncode == 1
    assert re.fullmatch(
        r"conformance: --only and --skip leave none of the \d{4} cases", result.stderr.strip()
    )


def test_a_worker_that_does_not_start():
    result = conformance("--device", "cpu", "--import", "no_such_module")
    assert result.returncode == 1
    assert "conformance: a worker does not start (the process ended with 1)" in result.stderr


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("the process ended with -11", "crashed"),
        ("the process ended with -9", "took too long, or memory ran out"),
        ("sample 0: raises NotImplementedError('x')", "is not implemented"),
        ("sample 0: raises RuntimeError('Could not run')", "is not implemented"),
        ("sample 0: raises RuntimeError('x')", "raises an error"),
        ("sample 0: only the cpu raises ValueError()", "takes what the CPU refuses"),
        ("sample 0: tensor 1 of 2 may be on the CPU", "tensors of two devices are not refused"),
        ("sample 0: layout [], announced []", "torch.compile expects another layout"),
        ("sample 0: draws from the CPU's generator", "draws from the generator of the CPU"),
        ("sample 0: Tensor-likes are not close!", "other values"),
        ("sample 0: dtype torch.int instead of torch.long", "other kind of result"),
        ("?", "other"),
    ],
)
def test_causes(message, cause):
    assert cause_of(message) == cause


def test_known_cases(tmp_path):
    outcomes = {("a", "x", "int"): "bad", ("a", "y", "int"): None, ("a", "z", "int"): None}
    report = Report(outcomes, {("a", "x"): "why", ("a", "y", "int"): "why not"})
    assert report.rows() == [("a", [3, 1, 1, 1])]
    assert report.failed == {("a", "y", "int"): "passes, but is listed as known"}
    file = tmp_path / "known.txt"
    file.write_text("operators\n")
    message = "known.txt must have lines 'suite/name: reason', got 'operators'$"
    with pytest.raises(ValueError, match=message):
        read_known(file)
    assert read_scores(tmp_path / "none.json", "foo", "2") == {}
