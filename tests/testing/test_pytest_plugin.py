"""A user's project uses the plugin from outside the package, without a conftest."""

import re
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from support.parts import whole
from support.processes import ENVIRONMENT, module, python

import foo_ops

OPERATOR = """\
import pytest
import torch

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

library.define(
    "stranger::rms_norm",
    "(Tensor input, Tensor weight, *, float eps=1e-6) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@library.register_fake("stranger::rms_norm")
def rms_norm_fake(input, weight, *, eps=1e-6):
    return input.new_empty(input.shape)


@library.register_kernel("stranger::rms_norm", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True)
def rms_norm(input, weight, eps, output, rows):
    size = input.shape[-1]
    for row in rows:
        x, y = input.row(row), output.row(row)
        total = language.zero(input)
        for i in range(size):
            total = language.accumulate(total, x[i] * x[i])
        scale = language.cast(1 / (total / size + eps) ** 0.5, input)
        for i in range(SIZE):
            y[i] = x[i] * scale * weight[i]


def setup_context(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.eps = keyword_only_inputs["eps"]


def backward(ctx, grad):
    input, weight = ctx.saved_tensors
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    x, w, g = (tensor.to(wide) for tensor in (input, weight, grad))
    scale = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    gw = g * w
    grad_x = scale * gw - x * scale**3 * (gw * x).mean(-1, keepdim=True)
    grad_w = (g * x * scale).flatten(0, -2).sum(0)
    return grad_x.to(input.dtype), grad_w.to(weight.dtype)


library.register_autograd("stranger::rms_norm", backward, setup_context=setup_context)


def sized(dtype, size):
    return Sample(tuple(random("rms_norm", (3, size), (size,), dtype=dtype)), {"eps": 1e-5})


def reference(input, weight, *, eps=1e-6):
    return input * (input.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


RMS_NORM = OpSpec(
    operator=torch.ops.stranger.rms_norm,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16),
    sized=sized,
    sizes=(7,),
)


@pytest.mark.operators(RMS_NORM)
def test_operator(operator_check):
    operator_check()


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_compiled(device):
    def block(x, weight):
        return torch.ops.stranger.rms_norm(x * 2, weight).relu()

    x, weight = torch.randn(4, 8, device=device), torch.ones(8, device=device)
    backend = "inductor" if device == "cpu" else "aot_eager"
    graph = torch.compile(block, backend=backend, fullgraph=True)
    torch.testing.assert_close(graph(x, weight), block(x, weight))
"""
RIGHT = OPERATOR.replace("SIZE", "size")
# Leaves out the last element of each row.
WRONG = OPERATOR.replace("SIZE", "size - 1")

WHERE = """

def test_where():
    import os
    import foo_ops
    import pytest_foo_ops

    for module in (foo_ops, pytest_foo_ops):
        assert module.__file__.startswith(os.environ["PYTHONPATH"])
"""


@pytest.fixture
def run(tmp_path):
    """Provide a function that writes a test file into a new folder and runs pytest there."""

    def run_pytest(text, *options, **environment):
        (tmp_path / "test_of_a_stranger.py").write_text(text)
        # A user does not have the modules beside our tests.
        environment = {"PYTHONPATH": ENVIRONMENT.get("PYTHONPATH", "")} | environment
        options = ("-p", "no:cacheprovider", *options)
        return python(module("pytest"), *options, folder=tmp_path, **environment)

    return run_pytest


def counts(process):
    """Return the numbers of passed and failed tests."""
    found = re.findall(r"(\d+) (\w+)", process.stdout.splitlines()[-1])
    return {word: int(count) for count, word in found if word in ("passed", "failed")}


@pytest.mark.whole
def test_operator_passes_its_matrix(run):
    process = run(RIGHT)
    assert process.returncode == 0, process.stdout
    assert counts(process)["passed"] > 120


def test_tests_are_chosen_by_words(run):
    process = run(RIGHT, "--collect-only", "-q", "-k", "rms_norm and foo and opcheck")
    names = re.findall(r"::test_operator\[(\S+)\]", process.stdout)
    assert names == [
        f"rms_norm-foo-{dtype}-opcheck-size7{gradient}"
        for dtype in ("float32", "bfloat16")
        for gradient in ("", "-gradient")
    ]


def test_what_is_wrong_is_said(run):
    process = run(WRONG, "-k", "cpu and float32 and (values or fake_kernel)")
    assert process.returncode == 1
    assert counts(process) == {"failed": 1, "passed": 7}
    assert re.search(
        r"AssertionError: output 0 is wrong in 3 of 21 elements; .* 3 of them are nan, which fills "
        "fresh memory during this check",
        process.stdout,
    )
    # The traceback leaves out the checks' own code, which does not help the author.
    assert "foo_ops/testing/checks/" not in process.stdout


@pytest.mark.parametrize("workers", [[], *whole(["-n", "2"])], ids=["one process", "two workers"])
def test_slowest_operators_are_listed(run, workers):
    process = run(RIGHT, "-k", "cpu and values", "--durations=1", *workers)
    (line,) = re.findall(r"=+ slowest 1 operators =+\n+(.*)\n", process.stdout)
    seconds, checks = re.fullmatch(r"(\S+)s stranger::rms_norm \((\d+) checks\)", line).groups()
    assert int(checks) == counts(process)["passed"]
    of_one_test = re.search(r"(\S+)s call +\S+::test_operator", process.stdout)[1]
    assert float(seconds) >= float(of_one_test) > 0.0


def test_operators_are_not_listed_unasked(run):
    assert "slowest" not in run(RIGHT, "-k", "cpu and values and bfloat16").stdout


def test_operators_must_be_named(run):
    process = run("def test_operator(operator_check): ...")
    assert process.returncode != 0
    assert "test_operator: a test with operator_check must name operators" in process.stdout


def test_checks_of_a_marker(run):
    text = RIGHT.replace("operators(RMS_NORM)", "operators(RMS_NORM, checks=['values'])")
    process = run(text, "--collect-only", "-q", "-k", "test_operator and float64")
    names = re.findall(r"::test_operator\[(\S+)\]", process.stdout)
    assert names
    assert all("-values-" in name for name in names)


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("'x'", "@pytest.mark.operators must be given foo_ops.testing.OpSpec, got 'x'"),
        (
            "SPEC, check=['values']",
            "@pytest.mark.operators takes specs, checks= and quick=, got check=",
        ),
        ("SPEC, checks=['value']", "cases: checks must be among "),
    ],
)
def test_markers_that_are_refused(run, marker, message):
    text = f"""
import pytest
from foo_ops.testing import ABS as SPEC

@pytest.mark.operators({marker})
def test_operator(operator_check): ...
"""
    process = run(text)
    assert process.returncode != 0
    assert f"test_of_a_stranger.py::test_operator: {message}" in process.stdout
    assert "Traceback" not in process.stdout


def test_torch_is_imported_only_where_it_is_needed(run):
    # A fork has imported torch already.
    text = "def test_nothing():\n    import sys\n    assert 'torch' not in sys.modules\n"
    process = run(text, new=True)
    assert process.returncode == 0, process.stdout


@pytest.fixture
def installation(tmp_path):
    """Lay out the package's files and entry points like a wheel, with the compiled library."""
    folder, project = tmp_path / "installed", Path(__file__).parents[2]
    folder.mkdir()
    command = ["setup.py", "--quiet", "egg_info", "--egg-base", folder, "build_py", "--build-lib"]
    # The build needs no torch, and must not find our package.
    subprocess.run([sys.executable, *command, folder], cwd=project, check=True, capture_output=True)
    library = Path(foo_ops._C.__file__)
    (folder / "foo_ops" / library.name).symlink_to(library)
    return folder


def test_plugin_of_an_installation(run, installation):
    """Without the project's folder: setup.py must declare every file."""
    # A new interpreter, as a user starts it: all modules come from the installation.
    options = {"new": True, "PYTHONPATH": str(installation)}
    process = run(RIGHT + WHERE, "-k", "where or (values and cpu and float32)", **options)
    assert process.returncode == 0, process.stdout + process.stderr
    assert counts(process)["passed"] > 5
    # The plugin came by its entry point.
    (entry,) = Distribution.at(installation / "foo_ops.egg-info").entry_points.select(
        group="pytest11"
    )
    assert entry.value == "pytest_foo_ops"
    options["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    process = run("def test_operator(operator_check): ...", **options)
    assert "fixture 'operator_check' not found" in process.stdout


STREAMS = """\
import pytest
import torch


def race():
    x = torch.ones(4, device="foo")
    with torch.foo.stream(torch.foo.Stream()):
        x + 1


def test_race():
    race()


def test_right():
    torch.ones(4, device="foo") + 1


@pytest.mark.foo_sanitizer
def test_marked():
    race()


@pytest.mark.foo_sanitizer(enabled=False)
def test_left_out():
    race()
"""


def test_marked_tests_run_under_the_sanitizer(run):
    process = run(STREAMS)
    assert counts(process) == {"passed": 3, "failed": 1}
    assert "race: tensor of shape (4,)" in process.stdout
    assert "test_of_a_stranger.py::test_marked" in process.stdout


def test_all_tests_run_under_the_sanitizer(run):
    process = run(STREAMS, "--foo-sanitizer", "--strict-markers")
    assert counts(process) == {"passed": 2, "failed": 2}
    assert "::test_race" in process.stdout
    assert "::test_marked" in process.stdout


def test_host_access_is_printed_although_pytest_captures(run):
    test = """\
import ctypes
import torch

def test_address():
    ctypes.string_at(torch.ones(4, device="foo").data_ptr(), 4)
"""
    process = run(test, "--foo-sanitizer")
    assert process.returncode != 0
    assert "foo_ops.sanitizer: host access: " in process.stderr
    assert "in test_address" in process.stderr
