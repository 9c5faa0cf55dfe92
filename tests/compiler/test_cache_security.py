"""Object code is loaded only from files that only this user and root could write."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from support.processes import BECOME, run

# Calls a kernel, and prints whether it was compiled. Arguments: the umask for new files, and the
# user to become first.
PROGRAM = f"""{BECOME}
import os, sys
import torch
from foo_ops.kernels.compiler import emit

if len(sys.argv) > 1:
    os.umask(int(sys.argv[1], 8))
compiled = []
compile_kernel = emit.compile_kernel
emit.compile_kernel = lambda build: compiled.append(1) or compile_kernel(build)
x = torch.tensor([-1.5, 2.0])
if len(sys.argv) > 2:
    become(int(sys.argv[2]))
    compiled.clear()
for dtype in (torch.float32, torch.float64):
    assert torch.ops.foo.abs(x.to(dtype)).tolist() == [1.5, 2.0]
print(len(compiled))
"""
COMPILED, LOADED = "2", "0"
SOMEBODY = 12345

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    cache = tmp_path_factory.mktemp("filled") / "cache"
    assert run(PROGRAM, cache) == (COMPILED, "")
    return cache


@pytest.fixture
def cache(filled, tmp_path):
    """Copy the folder of kernels, so that a test may change it."""
    return shutil.copytree(filled, tmp_path / "cache")


@pytest.fixture
def public():
    """Make a folder that everybody can access."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def modes(cache):
    return {stat.S_IMODE(path.stat().st_mode) for path in (cache, *cache.iterdir())}


@pytest.mark.parametrize("mask", ["000", "022", "077"])
def test_what_is_written_is_private(tmp_path, mask):
    cache = tmp_path / "above" / "cache"
    assert run(PROGRAM, cache, mask) == (COMPILED, "")
    assert modes(cache) == {0o700, 0o600}
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    assert run(PROGRAM, cache, mask) == (LOADED, "")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_folder_that_others_may_write(cache, mode):
    cache.chmod(mode)
    before = sorted(cache.iterdir())
    printed, logged = run(PROGRAM, cache)
    assert printed == COMPILED
    assert logged == (
        f"compiled kernels are not kept, since {cache} cannot be used: users other than its "
        "owner may write to it"
    )
    assert sorted(cache.iterdir()) == before


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_files_that_others_may_write(cache, mode):
    for path in cache.iterdir():
        path.chmod(mode)
    printed, logged = run(PROGRAM, cache)
    assert printed == COMPILED
    assert logged.count("is compiled again: users other than its owner may write to it") == 2
    # Both files have been replaced.
    assert modes(cache) == {0o700, 0o600}
    assert run(PROGRAM, cache) == (LOADED, "")


@as_root
def test_folder_of_somebody_else(cache):
    os.chown(cache, SOMEBODY, SOMEBODY)
    printed, logged = run(PROGRAM, cache)
    assert printed == COMPILED
    assert logged == (
        f"compiled kernels are not kept, since {cache} cannot be used: it belongs to user "
        f"{SOMEBODY}"
    )


@as_root
def test_files_of_somebody_else(cache):
    for path in cache.iterdir():
        os.chown(path, SOMEBODY, SOMEBODY)
    printed, logged = run(PROGRAM, cache)
    assert printed == COMPILED
    assert logged.count(f"is compiled again: it belongs to user {SOMEBODY}") == 2
    assert {path.stat().st_uid for path in cache.iterdir()} == {0}


@as_root
def test_folder_of_root_that_all_share(filled, public):
    cache = shutil.copytree(filled, public / "cache")
    cache.chmod(0o755)
    for path in cache.iterdir():
        path.chmod(0o644)
    assert run(PROGRAM, cache, "022", str(SOMEBODY)) == (LOADED, "")
    next(cache.iterdir()).unlink()
    printed, logged = run(PROGRAM, cache, "022", str(SOMEBODY))
    assert printed == "1"
    assert logged == (
        f"compiled kernels are not kept, since {cache} cannot be used: Permission denied"
    )


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_files_that_are_none(cache, tmp_path, kind):
    """A link to a valid file is not followed, and nobody waits for a pipe's writer."""
    for path in list(cache.iterdir()):
        elsewhere = path.rename(tmp_path / path.name)
        path.symlink_to(elsewhere) if kind == "link" else os.mkfifo(path)
    assert run(PROGRAM, cache)[0] == COMPILED
    assert all(path.is_file() and not path.is_symlink() for path in cache.iterdir())
    assert run(PROGRAM, cache) == (LOADED, "")


def test_folder_that_is_a_link(cache, tmp_path):
    """A cache folder may be in a home that is a link: the folder behind it counts."""
    link = tmp_path / "link"
    link.symlink_to(cache)
    assert run(PROGRAM, link) == (LOADED, "")
    cache.chmod(0o777)
    assert run(PROGRAM, link)[0] == COMPILED
