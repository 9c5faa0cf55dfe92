"""A fault of the cache on disk only costs time, and is reported once."""

import os
import shutil
import time
from pathlib import Path

import pytest
from support.processes import BECOME, run

import foo_ops
from foo_ops.kernels.compiler import cache

USE = """
import os, sys
import torch

x = torch.tensor([-1.0, 2.0])

def use(*dtypes):
    for dtype in dtypes:
        assert torch.ops.foo.abs(x.to(dtype)).tolist() == [1, 2]
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
@pytest.mark.parametrize("home", ["unset", "empty", "that cannot be made"])
def test_no_home(home):
    program = f"""{BECOME}{USE}
for name in ("FOO_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
    os.environ.pop(name, None)
if {home!r} == "empty":
    os.environ["HOME"] = ""
if {home!r} == "that cannot be made":
    os.environ["HOME"] = "/nowhere/at/all"
become(12345)
# No folder for temporary files either.
os.environ["TMPDIR"] = "/nowhere"
use(torch.float32, torch.float64, torch.int32)
"""
    logged = run(program, "")[1]
    assert logged == (
        "compiled kernels are not kept, since /nowhere/at/all/.cache/foo_ops cannot be used: "
        "Permission denied"
        if home == "that cannot be made"
        else "compiled kernels are not kept, since there is no home folder: set FOO_CACHE_DIR"
    )


def test_home_that_the_system_knows(monkeypatch, tmp_path):
    monkeypatch.delenv("FOO_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(cache, "_registered_home", lambda: str(tmp_path))
    assert cache.cache_directory() == tmp_path / ".cache" / "foo_ops"


@pytest.mark.parametrize("title", ["f" * 400, "ä" * 200, "名" * 90])
def test_long_names(title, tmp_path, monkeypatch):
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path / "cache"))
    names = {cache.file_name(title, key) for key in ("1" * 16, "2" * 16)}
    assert len(names) == 2
    assert all(len(name.encode()) <= 143 for name in names)
    for name in names:
        cache.write(name, name.encode())
    assert all(cache.read(name) == name.encode() for name in names)


def test_kernel_of_many_tensors(tmp_path):
    program = """
import torch
from foo_ops import library
from foo_ops.kernels.compiler import emit

names = [f"x{i}" for i in range(40)]
exec(f"def total({', '.join(names)}): return {' + '.join(names)}")
schema = f"({', '.join('Tensor ' + name for name in names)}) -> Tensor"
library.define("foo_many::total", schema)
kernel = library.elementwise_kernel(dtypes=[torch.float32])(total)
library.register_kernel("foo_many::total", "cpu", kernel)
compiled = []
compile_kernel = emit.compile_kernel
emit.compile_kernel = lambda build: compiled.append(1) or compile_kernel(build)
assert torch.ops.foo_many.total(*[torch.ones(3)] * 40).tolist() == [40] * 3
print(len(compiled))
"""
    assert run(program, tmp_path) == ("1", "")
    assert run(program, tmp_path) == ("0", "")


def test_folder_that_is_removed_while_it_is_in_use(tmp_path):
    program = f"""{USE}
import shutil
use(torch.float32)
shutil.rmtree(os.environ["FOO_CACHE_DIR"])
use(torch.float64)
print(len(os.listdir(os.environ["FOO_CACHE_DIR"])))
"""
    assert run(program, tmp_path / "cache") == ("1", "")


def test_full_disk(tmp_path):
    """The file size limit imitates a full disk. No half-written file is left behind."""
    program = f"""{USE}
import resource, signal
from foo_ops.kernels.compiler import cache

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
# Room for what is logged.
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
use(torch.float32, torch.float64)
"""
    logged = run(program, tmp_path)[1]
    assert logged == (
        f"compiled kernels are not kept, since {tmp_path} cannot be used: File too large"
    )
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_behind_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    old, new = (tmp_path / f"{name}{cache.UNFINISHED}" for name in ("old", "new"))
    foreign = tmp_path / "foreign.tmp"
    for path in (old, new, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (time.time() - 7200,) * 2)
    cache.write("f-1.o", b"code")
    assert {path.name for path in tmp_path.iterdir()} == {new.name, foreign.name, "f-1.o"}


# ------------------------------------------------------------------------------------- upgrades


@pytest.fixture
def package(tmp_path):
    """Copy the package, so that it can be upgraded while a program runs."""
    source = Path(foo_ops.__file__).parent
    target = tmp_path / "package" / "foo_ops"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("csrc", "__pycache__"))
    return target


def run_copy(program, package, cache_folder):
    return run(program, cache_folder, folder=package.parent, PYTHONPATH=str(package.parent))


UPGRADE = f"""{USE}
import foo_ops

def upgrade():
    path = os.path.join(os.path.dirname(foo_ops.__file__), "kernels", "user", "elementwise.py")
    with open(path, "a") as file:
        file.write("# Upgraded.\\n")
"""
WARNING = (
    "compiled kernels are not kept, since foo_ops or Numba has changed on disk while this process "
    "was running"
)


@pytest.mark.parametrize("moment", ["before the first kernel", "between kernels"])
def test_upgrade_under_a_running_process(package, tmp_path, moment):
    """Kernels compiled after the upgrade are cached for neither version."""
    program = f"""{UPGRADE}
import foo_ops.kernels
if {moment!r} == "between kernels":
    use(torch.float32)
upgrade()
use(torch.float64, torch.int32)
"""
    folder = tmp_path / "cache"
    assert run_copy(program, package, folder) == ("", WARNING)
    files = sorted(path.name.rpartition("-")[0] for path in folder.glob("*"))
    assert files == (["absolute-float32"] if moment == "between kernels" else [])
    # The new version compiles all kernels itself, and caches them.
    assert run_copy(f"{USE}\nuse(torch.float32, torch.float64)", package, folder) == ("", "")
    kept = [path.name.rpartition("-")[0] for path in folder.glob("*")]
    assert sorted(kept) == sorted([*files, "absolute-float32", "absolute-float64"])


def test_upgrade_before_the_compiler_is_loaded(package, tmp_path):
    """The process compiles all kernels with the new version."""
    folder = tmp_path / "cache"
    program = f"{UPGRADE}\nupgrade()\nuse(torch.float64)"
    assert run_copy(program, package, folder) == ("", "")
    assert [path.name.rpartition("-")[0] for path in folder.glob("*")] == ["absolute-float64"]


def test_upgrade_of_numba_under_a_running_process(tmp_path):
    program = f"""{USE}
import importlib.metadata
use(torch.float32)
importlib.metadata.version = lambda name: "99.0"
use(torch.float64)
print(sorted(name.rpartition("-")[0] for name in os.listdir(os.environ["FOO_CACHE_DIR"])))
"""
    assert run(program, tmp_path) == ("['absolute-float32']", WARNING)
