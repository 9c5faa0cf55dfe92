"""foo reports as free the memory that a program can allocate."""

from pathlib import Path

import pytest
import torch


def meminfo(name: str) -> int:
    """Read a number of bytes from /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def test_free_memory_includes_what_holds_copies_of_files(tmp_path: Path) -> None:
    # The file's pages are in the cache: not free, but available.
    (tmp_path / "file").write_bytes(bytes(256 << 20))
    available, unused = meminfo("MemAvailable"), meminfo("MemFree")
    free, total = torch.foo.mem_get_info()
    assert abs(free - available) < abs(free - unused)
    assert free <= total
    assert torch.accelerator.get_memory_info()[1] == total


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_former_names():
    tensor = torch.ones(100, device="foo:1")
    assert torch.foo.memory_cached(1) == torch.foo.memory_reserved(1) > 0
    for reset in (torch.foo.reset_max_memory_allocated, torch.foo.reset_max_memory_cached):
        before = torch.foo.memory_allocated(1)
        torch.ones(1000, device="foo:1")
        assert torch.foo.max_memory_allocated(1) > before
        reset(1)
        assert torch.foo.max_memory_allocated(1) == before
        assert torch.foo.max_memory_cached(1) == torch.foo.max_memory_reserved(1)
    assert tensor.sum().item() == 100


def test_former_names_warn():
    with pytest.warns(FutureWarning, match="renamed to `torch.foo.max_memory_reserved`") as caught:
        torch.foo.max_memory_cached()
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match="^torch.foo.reset_max_memory_cached now calls"):
        torch.foo.reset_max_memory_cached()
