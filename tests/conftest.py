"""Fixtures that every test module may use."""

import ctypes
import functools
import gc
import itertools
import mmap
import os
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from numba.core import types
from support.parts import part

from foo_ops.kernels.compiler import cache, emit
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.testing.checks import matrix

# A graph cached on disk still calls operators with the schemas of the day it was compiled.
os.environ |= {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
# Workers share the machine.
os.environ["FOO_RESULT_MEMORY"] = "128M"


# Number of tests left out, by reason.
left_out = pytest.StashKey[Counter]()


def pytest_addoption(parser):
    group = parser.getgroup("foo_ops")
    group.addoption(
        "--whole",
        action="store_true",
        help="run what make test-all does: tests that are marked so, and all checks of operators",
    )
    group.addoption("--part", type=part, help="K/N: run the Kth of N parts (from 1)")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "needs_compiler: torch.compile makes C++ of it; skipped where torch finds none"
    )
    config.addinivalue_line(
        "markers",
        "whole(apart=False): make test-all (--whole) runs it, make test does not; with apart=True "
        "its cases are in different parts, since they share nothing and take long",
    )
    config.option.foo_quick |= not config.option.whole
    config.stash[left_out] = Counter()


def pytest_collection_modifyitems(config, items):
    reasons = {item: reason_to_leave_out(config, item) for item in items}
    dropped = [item for item, reason in reasons.items() if reason]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        config.stash[left_out].update(filter(None, reasons.values()))
        items[:] = [item for item, reason in reasons.items() if not reason]


def reason_to_leave_out(config, item):
    if item.get_closest_marker("whole") and not config.option.whole:
        return "of make test-all (--whole)"
    if config.option.part is not None:
        number, count = config.option.part
        if zlib.crc32(what_stays_together(item).encode()) % count != number - 1:
            return "of other parts"
    return ""


def what_stays_together(item):
    """Name a test without its parameters; an operator's checks with their spec and dtype.

    Tests of one name share kernels, references and fixtures, so they stay in one part.
    """
    marker = item.get_closest_marker("whole")
    if marker is not None and marker.kwargs.get("apart"):
        return item.nodeid
    case = item.callspec.params.get("operator_check") if hasattr(item, "callspec") else None
    name = item.nodeid.partition("[")[0]
    return name if case is None else f"{name} {case.spec} {case.dtype}"


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(session.config.stash[left_out])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Merge the counts of an xdist worker; every worker collects the same tests."""
    node.config.stash[left_out] |= getattr(node, "workeroutput", {}).get("left out", {})


def pytest_terminal_summary(terminalreporter, config):
    """Print how many tests ran in each folder, and how many were left out and why."""
    reports = itertools.chain.from_iterable(terminalreporter.stats.values())
    ran = Counter(
        report.nodeid.split("/")[1].partition("::")[0]
        for report in reports
        if getattr(report, "when", "") == "call" and "/" in report.nodeid
    )
    if len(ran) > 1:
        counts = ", ".join(f"{folder} {count}" for folder, count in sorted(ran.items()))
        terminalreporter.write_line(f"{ran.total()} tests ran: {counts}")
    for reason, count in config.stash[left_out].items():
        terminalreporter.write_line(f"{count} tests {reason} were left out")


def leave_out_of_collections():
    """Freeze all live objects: a collection that visits them all takes seconds."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    leave_out_of_collections()


@pytest.fixture(scope="module")
def quick_collections():
    """Exclude the objects of earlier modules from ``gc.collect()``."""
    leave_out_of_collections()


# Memory that a process may gain before it is cleaned up, which takes a second.
ROOM = 200 << 20


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After a module, free compiled graphs and garbage: else the process grows to 4 GB."""
    yield
    global clean_memory
    if (nextitem is None or nextitem.path != item.path) and resident_memory() > clean_memory + ROOM:
        torch.compiler.reset()
        gc.collect()
        # Garbage lies between live blocks, so malloc keeps its pages.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        clean_memory = resident_memory()


def resident_memory():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


clean_memory = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("needs_compiler") and not has_compiler():
        pytest.skip("torch finds no C++ compiler")


@functools.cache
def has_compiler():
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


@pytest.fixture(autouse=True)
def gradients_are_recorded():
    """Fail a test that leaves gradients off: later tests would fail, or check nothing."""
    yield
    is_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert is_on, "the test has left gradients off"


@pytest.fixture(params=["cpu", "foo"])
def device(request):
    return request.param


@pytest.fixture(scope="session")
def compiled():
    """Provide ``compiled(function)``, which makes a C function whose arguments are integers."""
    numbers = itertools.count()

    def compile_function(function):
        count = function.__code__.co_argcount
        code = emit.compile_kernel(lambda: Kernel(function, (types.intp,) * count))
        address = cache.link(code, f"{function.__name__}-{next(numbers)}")
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(address)

    return compile_function


@pytest.fixture
def fresh_compiler():
    """Reset torch.compile before and after the test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def poisoned_memory():
    """Fill allocated, uninitialised memory with NaN."""
    with matrix.poisoned_memory():
        assert torch.empty(3).isnan().all()
        yield


@pytest.fixture
def one_thread():
    """Run on one thread: with many small tensors on a busy machine threads mostly wait.

    A test may set another number; the previous one is restored afterwards.
    """
    with matrix.threads(1):
        yield


@pytest.fixture
def products_of_cpu():
    """Multiply matrices on foo with the CPU's kernels, so that results are equal bit for bit."""
    torch.foo.set_matmul_kernels("cpu")
    yield
    torch.foo.set_matmul_kernels("foo")


@pytest.fixture
def attention_calls(monkeypatch):
    """Record the calls that models of transformers make, as (queries, keys, attn_bias is given)."""
    operator = torch.ops.foo.attention.default
    seen = []

    def spy(query, key, value, attn_bias, **options):
        seen.append((query.shape[2], key.shape[2], attn_bias is not None))
        return operator(query, key, value, attn_bias, **options)

    monkeypatch.setattr(torch.ops.foo.attention, "default", spy)
    return seen
