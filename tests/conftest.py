"""Fixtures that every test module may use."""

import ctypes
import functools
import gc
import itertools
import os

import pytest
import torch
from numba.core import types

from foo_ops.kernels.compiler import emit, load
from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.testing.checks import contexts

# A graph that was kept on disk still calls operators with the schemas of its day.
os.environ |= {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "needs_compiler: torch.compile makes C++ of it; skipped where torch finds none"
    )


def leave_out_of_collections():
    """Look for garbage among later objects alone: among all that is there by now takes seconds."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    leave_out_of_collections()


@pytest.fixture(scope="module")
def quick_collections():
    """Let ``gc.collect()`` leave out what the tests of other modules made."""
    leave_out_of_collections()


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
    """Let no test turn gradients off for others: many would fail, and some check nothing."""
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
        address = load.link(code, f"{function.__name__}-{next(numbers)}")
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(address)

    return compile_function


@pytest.fixture
def fresh_compiler():
    """Forget all that other tests compiled, and leave nothing for the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def poisoned_memory():
    """Fill memory that is allocated and not initialised with NaN."""
    with contexts.poisoned_memory():
        assert torch.empty(3).isnan().all()
        yield


@pytest.fixture
def one_thread():
    """Run on one thread: with many small tensors on a busy machine threads mostly wait.

    A test may set another number; afterwards it is as it was.
    """
    with contexts.threads(1):
        yield


@pytest.fixture
def products_of_cpu():
    """Let the CPU's kernels multiply matrices on foo: results are then the same to the last bit."""
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
