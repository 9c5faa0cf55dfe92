"""Kernels compile once, then come from the cache, and a broken cache only costs time."""

import shutil

import llvmlite.binding as llvm
import pytest
from support.processes import python, run, start

from foo_ops.kernels.compiler import processor
from foo_ops.kernels.compiler.cache import cache_directory
from foo_ops.kernels.compiler.resolve import resolve

DTYPES = ("float32", "float64", "bfloat16", "int8", "int16", "int32", "int64")
# Calls a kernel for each dtype and prints how many were compiled, and whether Numba was needed.
PROGRAM = f"""
import sys
import torch
from foo_ops.kernels.compiler import emit

compiled = []
compile_kernel = emit.compile_kernel

def recording(build):
    compiled.append(build.args)
    return compile_kernel(build)

emit.compile_kernel = recording
x = torch.tensor([-1.5, 0.0, 2.0])
for name in {DTYPES}:
    y = x.to(getattr(torch, name))
    assert torch.equal(torch.ops.foo.abs(y), torch.abs(y)), name
print(len(compiled), "numba" in sys.modules)
"""
COMPILED, LOADED = f"{len(DTYPES)} True", "0 False"


def contents(cache):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in cache.iterdir()}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Fill a cache folder with all kernels that the program needs."""
    cache = tmp_path_factory.mktemp("filled") / "made on demand"
    assert run(PROGRAM, cache) == (COMPILED, "")
    return cache


def test_files_are_named_after_kernel_and_dtype(filled):
    names = sorted(path.name.rpartition("-")[0] for path in filled.iterdir())
    assert names == sorted(f"absolute-{dtype}" for dtype in DTYPES)
    assert all(path.suffix == ".o" for path in filled.iterdir())


def test_second_process_loads_what_the_first_compiled(filled):
    before = contents(filled)
    assert run(PROGRAM, filled) == (LOADED, "")
    assert contents(filled) == before


@pytest.mark.parametrize(
    "environment", [{"FOO_VECTOR_BITS": "128"}, {"NUMBA_CPU_NAME": "generic"}], ids=str
)
def test_another_processor_compiles_for_itself(filled, tmp_path, environment):
    cache = shutil.copytree(filled, tmp_path / "cache")
    assert run(PROGRAM, cache, **environment) == (COMPILED, "")
    assert len(contents(cache)) == 2 * len(DTYPES)


def test_broken_files_are_compiled_again_and_replaced(filled, tmp_path):
    spoil = (
        lambda code: b"",
        lambda code: code[:20],
        lambda code: code[:-1],
        lambda code: code + b"\0",
        lambda code: code[:-100] + bytes([code[-100] ^ 1]) + code[-99:],
        lambda code: bytes([code[0] ^ 1]) + code[1:],
        lambda code: b"not a kernel" * 1000,
    )
    for path, change in zip(filled.iterdir(), spoil, strict=True):
        (tmp_path / path.name).write_bytes(change(path.read_bytes()))
    printed, logged = run(PROGRAM, tmp_path)
    assert printed == COMPILED
    assert logged.count("is broken and is compiled again") == len(spoil)
    assert contents(tmp_path).keys() == contents(filled).keys()
    assert run(PROGRAM, tmp_path) == (LOADED, "")


def test_folders_in_place_of_files(filled, tmp_path):
    for path in filled.iterdir():
        (tmp_path / path.name).mkdir()
    printed, logged = run(PROGRAM, tmp_path)
    assert printed == COMPILED
    assert logged.count("compiled kernels are not kept") == len(DTYPES)
    # No temporary file is left behind.
    assert all(path.is_dir() for path in tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["file/cache", "/proc/foo_ops"])
def test_cache_that_cannot_be_written(tmp_path, folder):
    """Root may write everywhere except inside a file and in /proc."""
    (tmp_path / "file").write_text("in the way")
    printed, logged = run(PROGRAM, tmp_path / folder)
    assert printed == COMPILED
    assert "compiled kernels are not kept" in logged
    assert (tmp_path / "file").read_text() == "in the way"


THREADS = """
import threading
import torch
from foo_ops.kernels.compiler import emit

compiled, results, errors = [], [], []
compile_kernel = emit.compile_kernel

def recording(build):
    compiled.append(build.args)
    return compile_kernel(build)

emit.compile_kernel = recording
barrier = threading.Barrier(8)
x = torch.linspace(-3, 3, 10_001)
query = torch.zeros(1, 1, 5, 4)

def work():
    barrier.wait()
    try:
        results.append(torch.ops.foo.abs(x))
        results.append(torch.ops.foo.attention(query, query, query + 2)[0])
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert len(results) == 16
for result in results:
    expected = x.where(x > 0, -x) if result.dim() == 1 else query + 2
    assert torch.equal(result, expected)
print(len(compiled))
"""


def test_eight_threads_compile_a_kernel_once(tmp_path):
    assert run(THREADS, tmp_path) == ("2", "")
    assert len(contents(tmp_path)) == 2
    assert run(THREADS, tmp_path) == ("0", "")


def test_processes_that_fill_one_cache_at_once(tmp_path):
    processes = [start(PROGRAM, FOO_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    results = [process.wait() for process in processes]
    assert [(it.returncode, it.stderr) for it in results] == [(0, "")] * 2
    assert len(contents(tmp_path)) == len(DTYPES)
    assert run(PROGRAM, tmp_path) == (LOADED, "")


def test_thread_that_waits_for_a_kernel_holds_no_lock_that_python_needs(tmp_path):
    """The compiling thread takes the GIL, so the waiting caller's C++ code must not hold it."""
    program = """
import threading, torch
ticks = []
done = threading.Event()

def tick():
    while not done.wait(0.01):
        ticks.append(None)

threading.Thread(target=tick).start()
torch.ops.foo.abs(torch.ones(3, dtype=torch.complex64))
done.set()
print(len(ticks) > 5)
"""
    assert run(program, tmp_path) == ("True", "")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache_directory() == tmp_path / "chosen"
    monkeypatch.delenv("FOO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "foo_ops"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "foo_ops"


def test_same_address_every_time():
    assert resolve("foo::abs", "float32") == resolve("foo::abs", "float32")
    assert resolve("foo::abs", "float32") != resolve("foo::abs", "float64")


# Values and gradients as compiled for another processor. Argument: the dtype.
PROCESSOR = """
import dataclasses
import sys
import torch
from foo_ops import testing

dtype = getattr(torch, sys.argv[1])
for spec in testing.OPERATORS:
    spec = dataclasses.replace(spec, dtypes=(dtype,), devices=("cpu",))
    testing.check_operator(spec, checks=("values", "gradients"))
print("right")
"""


@pytest.mark.whole
@pytest.mark.parametrize(
    ("dtype", "environment"),
    [
        ("float32", {"FOO_VECTOR_BITS": "256"}),
        ("float16", {"FOO_VECTOR_BITS": "128"}),
        ("float32", {"NUMBA_CPU_NAME": "generic"}),
        # As with AVX512-BF16, whose instructions are emulated.
        (
            "bfloat16",
            {"FOO_MATRIX_UNIT": "0", "FOO_BFLOAT16_PAIRS": "1", "FOO_VECTOR_BITS": "512"},
        ),
        ("bfloat16", {"FOO_MATRIX_UNIT": "0", "FOO_BFLOAT16_PAIRS": "0"}),
        # As with AMX, whose tiles are multiplied with vectors where it is missing.
        ("float32", {"FOO_MATRIX_UNIT": "1"}),
        # With F16C: LLVM would otherwise call missing functions for float16.
        (
            "float16",
            {"FOO_MATRIX_UNIT": "1", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+f16c"},
        ),
        ("bfloat16", {"FOO_MATRIX_UNIT": "1", "FOO_VECTOR_BITS": "256"}),
        ("float32", {"FOO_MATRIX_UNIT": "0"}),
    ],
    ids=str,
)
def test_kernels_for_other_processors(dtype, environment):
    """The user's own cache is used, so that only the first run compiles."""
    assert run(PROCESSOR, cache_directory(), dtype, **environment) == ("right", "")


def test_vector_width_must_be_one_that_exists(tmp_path):
    program = "import torch; torch.ops.foo.abs(torch.ones(3))"
    process = python(program, FOO_CACHE_DIR=str(tmp_path), FOO_VECTOR_BITS="9")
    assert process.returncode == 1
    assert "FOO_VECTOR_BITS must be 128, 256 or 512, got 9" in process.stderr


@pytest.mark.parametrize("name", ["FOO_BFLOAT16_PAIRS", "FOO_MATRIX_UNIT"])
def test_switch_must_be_on_or_off(tmp_path, name):
    program = "import torch; torch.ops.foo.attention(*torch.ones(3, 1, 1, 2, 4).bfloat16())"
    process = python(program, FOO_CACHE_DIR=str(tmp_path), **{name: "yes"})
    assert process.returncode == 1
    assert f"{name} must be 0 or 1, got yes" in process.stderr


def test_stored_kernels_may_use_the_matrix_unit(tmp_path):
    """The loading process requests the unit's registers, like the compiling one."""
    program = "import torch; torch.ops.foo.attention(*torch.ones(3, 1, 1, 64, 64).bfloat16())"
    run(program, tmp_path, FOO_MATRIX_UNIT="1")
    before = contents(tmp_path)
    run(program, tmp_path, FOO_MATRIX_UNIT="1")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("has_avx512", [False, True])
def test_llvm_prefers_the_widest_vectors(monkeypatch, has_avx512):
    features = llvm.FeatureMap({"avx2": True, "avx512f": has_avx512}).flatten()
    monkeypatch.setattr(processor, "_features_of_host", lambda: features)
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    assert ("-prefer-256-bit" in processor.target()[2].split(",")) == has_avx512


@pytest.mark.parametrize(
    "link",
    [
        # All of pytest, through the names that a test file's asserts use.
        "made.before = links[-1:]",
        # The other links are behind a chain that is deeper than Python's stack.
        "made.before = links and links[0]; links.clear()",
    ],
    ids=["many", "deep"],
)
def test_functions_that_refer_to_all_there_is(link, tmp_path):
    """Hashing it all would take minutes and gigabytes: the kernel is right, but not cached."""
    program = f"""
import torch
from numba.extending import intrinsic
from foo_ops import language, library

class Link:
    pass

links = []
for _ in range(100_000):
    made = Link()
    {link}
    links.append(made)

@intrinsic
def doubled(typing_context, number):
    def emit(context, builder, signature, args):
        assert made is not links
        return builder.fadd(*args, *args)
    return number(number), emit

@library.numba_op("foo_endless::twice")
def twice(x: float) -> float:
    return language.floor(doubled(x))

@library.numba_op("foo_endless::half")
def half(x: float) -> float:
    return x * 0.5

ones = torch.ones(3)
print(torch.ops.foo_endless.twice(ones).tolist(), torch.ops.foo_endless.half(ones).tolist())
"""
    for _ in range(2):
        printed, logged = run(program, tmp_path)
        assert printed == "[2.0, 2.0, 2.0] [0.5, 0.5, 0.5]"
        assert logged == (
            "the kernel twice is compiled by each process, since its functions refer to more than "
            "1000 functions, classes and objects"
        )
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["half"]
