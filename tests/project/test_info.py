"""``python -m foo_ops.info`` reports the facts, and works where some are missing."""

import importlib.metadata
import os
import platform
import re
import time
from pathlib import Path

import llvmlite.binding
import pytest
import torch
from support.processes import module, python

import foo_ops
from foo_ops import info
from foo_ops.kernels.compiler import cache


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return the report of a fresh process whose cache folder holds two kernels."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "abs-float32-0123456789abcdef.o").write_bytes(bytes(2048))
    old = cache / "attention_forward-bfloat16-fedcba9876543210.o"
    old.write_bytes(bytes(100))
    os.utime(old, (time.time() - 7_300,) * 2)
    settings = {"FOO_CACHE_DIR": str(cache), "FOO_DEVICE_COUNT": "3", "OMP_NUM_THREADS": "1"}
    settings["FOO_RESULT_MEMORY"] = "1536M"
    process = python(module("foo_ops.info"), **settings)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout, settings


def value(report, name):
    """Return the text beside ``name``, which must occur once."""
    (found,) = re.findall(rf"^  {re.escape(name)} {{2,}}(.*)$", report, re.MULTILINE)
    return found


def test_versions(printed):
    report, _ = printed
    assert value(report, "foo_ops") == f"{foo_ops.__version__} in {Path(foo_ops.__file__).parent}"
    assert re.match(r"GCC: |clang version ", value(report, "foo_ops._C"))
    assert value(report, "torch").startswith(f"{torch.__version__}, GCC")
    for package in ("numba", "numpy"):
        assert value(report, package) == importlib.metadata.version(package)
    llvm = ".".join(map(str, llvmlite.binding.llvm_version_info))
    assert value(report, "llvmlite") == f"{importlib.metadata.version('llvmlite')}, LLVM {llvm}"
    assert value(report, "Python").startswith(platform.python_version())
    assert value(report, "system") == platform.platform()


def test_processor(printed):
    report, _ = printed
    assert value(report, "LLVM target").startswith(llvmlite.binding.get_host_cpu_name())
    assert value(report, "torch kernels") == torch.backends.cpu.get_cpu_capability()
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1]
    units = value(report, "vector units").split()
    for flag, unit in {"avx2": "AVX2", "f16c": "F16C", "avx512f": "AVX-512F"}.items():
        assert (flag in flags.split()) == (unit in units)


def test_threads(printed):
    report, _ = printed
    assert value(report, "torch").startswith(torch.__version__)
    assert value(report, "torch threads") == "1"
    assert re.match(r"1, /.*/libgomp", value(report, "OpenMP"))
    assert value(report, "processors").startswith(f"{os.cpu_count()}, of which")


def test_memory(printed):
    report, _ = printed
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert value(report, "total memory") == info.amount(physical)
    assert value(report, "available").endswith("iB")
    assert value(report, "huge pages") in ("always", "madvise", "never")
    assert value(report, "of freed results") == "0 B of at most 1.5 GiB"


def test_devices(printed):
    report, _ = printed
    for index in range(3):
        assert value(report, f"foo:{index}").endswith(", 0 B allocated")
        assert "unknown" not in value(report, f"foo:{index}")
    assert "foo:3" not in report


def test_allocated_memory_is_counted():
    before = torch.foo.memory_allocated(0)
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="foo")
    _, text = info.device(0)
    assert text.endswith(f", {info.amount(before + tensor.nbytes)} allocated")


def test_kernel_cache(printed):
    report, settings = printed
    assert value(report, "folder") == f"{settings['FOO_CACHE_DIR']}, writable"
    assert value(report, "compiled") == "2 kernels, 2.1 KiB"
    assert re.fullmatch(r"2\.0 KiB, \d+ seconds? old", value(report, "abs float32"))
    assert value(report, "attention_forward bfloat16") == "100 B, 2 hours old"


def test_environment(printed):
    report, settings = printed
    for name, setting in settings.items():
        assert value(report, name) == setting


def test_nothing_is_unknown_and_columns_are_aligned(printed):
    report, _ = printed
    assert not re.search(r"^  unknown |unknown \(", report, re.MULTILINE)
    rows = [line for line in report.splitlines() if line.startswith("  ")]
    column = len(rows[0]) - len(re.sub(r"^  \S+ +", "", rows[0]))
    assert all(row[column - 2 : column] == "  " and row[column] != " " for row in rows)


def test_numba_is_not_imported():
    program = (
        "import sys; from foo_ops import info; info.report(); sys.exit('numba' in sys.modules)"
    )
    assert python(program).returncode == 0


def test_cache_folder_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path / "none"))
    assert cache.cache_directory() == tmp_path / "none"
    assert info.kernel_cache() == [("folder", f"{tmp_path / 'none'}, which does not exist yet")]


def test_cache_file_of_another_name(tmp_path, monkeypatch):
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path))
    (tmp_path / "stray.o").write_bytes(b"")
    assert info.kernel_cache()[1] == ("compiled", "1 kernel, 0 B")


def advised(monkeypatch, threads=2, cores=2, nodes=1, huge="madvise", **environment):
    for name in info.BINDINGS:
        monkeypatch.delenv(name, raising=False)
    for name, setting in environment.items():
        monkeypatch.setenv(name, setting)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(info, "usable_cores", lambda: cores)
    monkeypatch.setattr(info, "usable_nodes", lambda: [f"node{it}" for it in range(nodes)])
    monkeypatch.setattr(info, "huge_pages", lambda: huge)
    return info.advice()


@pytest.mark.parametrize(
    ("machine", "rows"),
    [
        ({}, [("none", "threads and memory are set up well")]),
        (
            {"threads": 3},
            [("threads", "3 threads share 2 cores: torch.set_num_threads(2)")],
        ),
        (
            {"threads": 16, "cores": 16},
            [("binding", "bind threads to cores: OMP_PROC_BIND=close OMP_PLACES=cores")],
        ),
        (
            {"threads": 16, "cores": 16, "nodes": 2, "OMP_PROC_BIND": "close"},
            [("NUMA nodes", "start one process on each of the 2 nodes")],
        ),
        ({"huge": "never"}, [("huge pages", f"allow them in {info.HUGE_PAGES}: madvise")]),
    ],
)
def test_advice(monkeypatch, machine, rows):
    assert advised(monkeypatch, **machine) == rows


def test_lists_of_processors():
    assert info.numbers_of("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert info.numbers_of("\n") == set()
    assert 1 <= info.usable_cores() <= len(os.sched_getaffinity(0))


def test_facts_that_cannot_be_read_are_unknown(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", broken)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_name", broken)
    monkeypatch.setattr(importlib.metadata, "version", broken)
    monkeypatch.setattr(Path, "read_text", broken)
    monkeypatch.setattr(torch.foo, "device_count", broken)
    report = info.report()
    reason = "RuntimeError: no such instruction"
    for name in ("numba", "LLVM target", "vector units", "name", "OpenMP"):
        assert value(report, name) == f"unknown ({reason})"
    assert re.search(rf"^Memory\n  unknown  +{reason}$", report, re.MULTILINE)
    assert re.search(rf"^Devices\n  unknown  +{reason}$", report, re.MULTILINE)
    assert f"{foo_ops.__version__} in " in report


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5120.0 GiB")]
)
def test_amounts(size, text):
    assert info.amount(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 seconds old"),
        (1, "1 second old"),
        (119, "1 minute old"),
        (90_000, "1 day old"),
        (200_000, "2 days old"),
    ],
)
def test_ages(seconds, text):
    assert info.age(seconds) == text
