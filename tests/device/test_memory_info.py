"""The memory that foo reports as free is what a program can have."""

from pathlib import Path

import torch


def meminfo(name: str) -> int:
    """Read a number of bytes from the system's own table."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def test_free_memory_includes_what_holds_copies_of_files(tmp_path: Path) -> None:
    # The pages of the file are not free, but available.
    (tmp_path / "file").write_bytes(bytes(256 << 20))
    available, unused = meminfo("MemAvailable"), meminfo("MemFree")
    free, total = torch.foo.mem_get_info()
    assert abs(free - available) < abs(free - unused)
    assert free <= total
    assert torch.accelerator.get_memory_info()[1] == total
