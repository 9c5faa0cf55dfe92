"""Kernels are compiled ahead of time; the least recently used leave the cache."""

import dataclasses
import os
import re
import sys

import pytest
import torch
from support.processes import BECOME, module, python, run

from foo_ops import compile as warm_start
from foo_ops.kernels.compiler import cache
from foo_ops.testing import OPERATORS


def compile_ahead(folder, *arguments):
    return python(module("foo_ops.compile"), *arguments, FOO_CACHE_DIR=str(folder))


USE = """
import torch
from foo_ops.kernels.compiler import emit

compiled = []
compile_kernel = emit.compile_kernel
emit.compile_kernel = lambda build: compiled.append(1) or compile_kernel(build)

def use():
    x = torch.randn(3, 8, requires_grad=True)
    torch.ops.foo.silu_mul(x, x).sum().backward()
    torch.ops.foo.rms_norm(x, torch.ones(8)).sum().backward()
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm") / "cache"
    process = compile_ahead(folder, "silu_mul", "rms_norm", "--dtypes", "float32")
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    kernels = list(folder.iterdir())
    megabytes = sum(path.stat().st_size for path in kernels) / 2**20
    *lines, total = process.stdout.splitlines()
    found = [re.match(r"(\w+): (\d+) kernels compiled in \d+\.\d s$", line) for line in lines]
    assert [line[1] for line in found] == ["silu_mul", "rms_norm"]
    assert sum(int(line[2]) for line in found) == len(kernels)
    assert total == f"{folder} has {len(kernels)} kernels, {megabytes:.1f} MB"
    # Only the requested dtype.
    assert {dtype for path in kernels for dtype in warm_start.DTYPES if dtype in path.name} == {
        "float32"
    }
    return folder


def test_nothing_is_compiled_afterwards(warm):
    assert run(f"{USE}\nuse()\nprint(len(compiled))", warm) == ("0", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_folder_that_cannot_be_written(warm, tmp_path):
    """Root owns it, as in an image, and another user runs the program: nothing is logged."""
    # That user cannot access the parent folders, but folders opened before stay open.
    program = f"""{BECOME}{USE}
import os
become(12345)
assert not os.access(os.environ["FOO_CACHE_DIR"], os.W_OK)
use()
print(len(compiled) - 1)
"""
    paths = [warm, *warm.parents]
    before = {path: path.stat().st_mode for path in paths}
    try:
        for path in paths:
            path.chmod(before[path] | 0o055)
        for path in warm.iterdir():
            path.chmod(0o644)
        assert run(program, warm) == ("0", "")
    finally:
        for path in paths:
            path.chmod(before[path])


def test_operators_are_named_once():
    named = [spec for specs in warm_start.operators().values() for spec in specs]
    assert named == list(OPERATORS)
    assert {"abs", "attention", "linear"} <= warm_start.operators().keys()


def test_an_operator_is_called_in_its_own_dtypes(monkeypatch):
    spec = dataclasses.replace(OPERATORS[0], dtypes=(torch.float32, torch.float64))
    called = []
    monkeypatch.setattr(warm_start, "OPERATORS", (spec,))
    monkeypatch.setattr(warm_start, "_call", lambda spec, dtype: called.append((spec, dtype)))
    (name,) = warm_start.operators()
    warm_start.compile_operator(name, [torch.bfloat16, torch.float64])
    assert called == [(spec, torch.float64)]


def test_products_are_not_left_to_torch(monkeypatch, tmp_path):
    """Otherwise our kernels would be missing on processors where torch's are not faster."""
    called = []

    def record(*arguments):
        called.append((*arguments, os.environ["FOO_TORCH_PRODUCTS"]))

    monkeypatch.setattr(warm_start, "compile_operator", record)
    monkeypatch.setattr(sys, "argv", ["compile", "linear", "--dtypes", "bfloat16"])
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FOO_TORCH_PRODUCTS", "1")
    warm_start.main()
    assert called == [("linear", [torch.bfloat16], "0")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["norm"],
            "foo_ops.compile: there is no operator norm; the operators are abs, attention, ",
        ),
        ([], "foo_ops.compile: name operators or pass --all; the operators are abs, "),
        (["abs", "--all"], "foo_ops.compile: name operators or pass --all; the operators are "),
    ],
)
def test_wrong_names(tmp_path, arguments, message):
    process = compile_ahead(tmp_path / "cache", *arguments)
    assert process.returncode == 1
    assert process.stderr.startswith(message)
    assert not (tmp_path / "cache").exists()


def test_no_place_for_kernels(tmp_path):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "cache"
    process = compile_ahead(folder, "abs")
    assert process.returncode == 1
    assert process.stderr == (
        f"foo_ops.compile: compiled kernels are not kept, since {folder} cannot be used: Not a "
        "directory\n"
    )


# ---------------------------------------------------------------------------------------- limit


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """Make a cache with room for three kernels of 1000 bytes, and write them."""
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FOO_CACHE_LIMIT", "4K")
    tmp_path.chmod(0o700)
    for number in range(3):
        cache.write(f"k-{number}.o", bytes(1000))
        os.utime(tmp_path / f"k-{number}.o", (1000 + number, 1000 + number))
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_oldest_leave(limited):
    cache.write("new-1.o", bytes(1000))
    assert names(limited) == ["k-1.o", "k-2.o", "new-1.o"]
    cache.write("new-2.o", bytes(2500))
    assert names(limited) == ["new-1.o", "new-2.o"]


def test_what_was_used_stays(limited):
    written = (limited / "k-0.o").stat().st_mtime_ns
    assert cache.read("k-0.o") == bytes(1000)
    assert (limited / "k-0.o").stat().st_mtime_ns == written
    cache.write("new-1.o", bytes(1000))
    assert names(limited) == ["k-0.o", "k-2.o", "new-1.o"]


def test_newest_stays_though_it_is_larger_than_the_limit(limited):
    cache.write("new-1.o", bytes(9000))
    assert names(limited) == ["new-1.o"]


def test_what_is_no_kernel_stays(limited):
    (limited / "notes.txt").write_bytes(bytes(9000))
    cache.write("new-1.o", bytes(500))
    assert names(limited) == ["k-0.o", "k-1.o", "k-2.o", "new-1.o", "notes.txt"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("700", 700), ("3K", 3072), ("2M", 2 * 2**20), ("5G", 5 * 2**30), ("", 2**30)],
)
def test_limit(monkeypatch, text, size):
    monkeypatch.setenv("FOO_CACHE_LIMIT", text)
    assert cache._limit() == size


def test_limit_that_is_none(tmp_path):
    program = "import torch; print(torch.ops.foo.abs(torch.tensor([-1.0])).item())"
    assert run(program, tmp_path, FOO_CACHE_LIMIT="much") == (
        "1.0",
        "FOO_CACHE_LIMIT must be a number of bytes, such as 1000000, 512M or 2G, got 'much'; 1G is "
        "used",
    )
