"""``python -m foo_ops.info`` prints the facts for a bug report.

A report must come out on the machine that has the bug, so a fact that cannot be read is reported as
unknown, with the reason. Numba is not imported, since it may be broken itself.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

import foo_ops
import foo_ops._C

Rows = list[tuple[str, str]]

VECTOR_UNITS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avxvnni": "AVX-VNNI",
    "avx512f": "AVX-512F",
    "avx512vnni": "AVX512-VNNI",
    "avx512bf16": "AVX512-BF16",
    "avx512fp16": "AVX512-FP16",
    "amx-bf16": "AMX-BF16",
    "neon": "NEON",
    "fullfp16": "FP16",
    "bf16": "BF16",
    "sve": "SVE",
}
"""LLVM's feature names, and their common names."""

BINDINGS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
FEWEST_TO_BIND = 4
"""With fewer threads, the system seldom moves them."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

VARIABLES = re.compile(r"FOO_|NUMBA_|OMP_|MKL_|GOMP_|KMP_|TORCH|PYTORCH|LD_PRELOAD$")


def report() -> str:
    """Return the whole report as aligned text."""
    sections: dict[str, Callable[[], Rows]] = {
        "Versions": versions,
        "Processor": processor,
        "Threads": threads,
        "Memory": memory,
        "Devices": devices,
        "Kernel cache": kernel_cache,
        "Environment": environment,
        "Advice": advice,
    }
    facts = {title: rows_or_reason(section) for title, section in sections.items()}
    width = max(len(name) for rows in facts.values() for name, _ in rows)
    return "\n\n".join(
        "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])
        for title, rows in facts.items()
    )


def rows_or_reason(section: Callable[[], Rows]) -> Rows:
    try:
        return section()
    except Exception as error:
        return [("unknown", f"{type(error).__name__}: {error}")]


def known(read: Callable[[], str]) -> str:
    """Return what ``read`` returns, or the reason why it failed."""
    try:
        return read()
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


def versions() -> Rows:
    return [
        ("foo_ops", f"{foo_ops.__version__} in {Path(foo_ops.__file__).parent}"),
        ("foo_ops._C", known(extension_compiler)),
        ("torch", f"{torch.__version__}, {known(torch_compiler)}"),
        ("numba", known(lambda: importlib.metadata.version("numba"))),
        ("llvmlite", known(llvmlite_version)),
        ("numpy", known(lambda: importlib.metadata.version("numpy"))),
        ("Python", f"{platform.python_version()}, {platform.python_compiler()}"),
        ("system", platform.platform()),
    ]


def extension_compiler() -> str:
    """Return the compilers that left their name in the extension's ELF section .comment."""
    binary = Path(foo_ops._C.__file__).read_bytes()
    names = re.findall(rb"GCC: \([^)\0]*\) [\d.]+|clang version [\d.]+", binary)
    return ", ".join(sorted({name.decode() for name in names})) or "unknown compiler"


def torch_compiler() -> str:
    return torch.__config__.show().split("\n")[1].strip(" -")


def llvmlite_version() -> str:
    import llvmlite.binding

    llvm = ".".join(map(str, llvmlite.binding.llvm_version_info))
    return f"{llvmlite.__version__}, LLVM {llvm}"


def processor() -> Rows:
    return [
        ("name", known(processor_name)),
        ("LLVM target", known(llvm_target)),
        ("vector units", known(vector_units)),
        ("torch kernels", torch.backends.cpu.get_cpu_capability()),
        ("torch products", known(foo_ops._C.torch_products)),
    ]


def processor_name() -> str:
    """Return the name Linux knows; ARM kernels give none, so fall back on the architecture."""
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.machine()


def llvm_target() -> str:
    import llvmlite.binding

    return f"{llvmlite.binding.get_host_cpu_name()}, {llvmlite.binding.get_process_triple()}"


def vector_units() -> str:
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    return " ".join(name for feature, name in VECTOR_UNITS.items() if features.get(feature))


def threads() -> Rows:
    return [
        ("processors", f"{os.cpu_count()}, of which this process may use {usable_processors()}"),
        ("torch threads", f"{torch.get_num_threads()}"),
        ("torch interop", f"{torch.get_num_interop_threads()}"),
        ("OpenMP", known(openmp_threads)),
        ("binding", binding()),
        ("NUMA nodes", known(lambda: f"{len(usable_nodes())}")),
    ]


def usable_processors() -> int:
    return len(os.sched_getaffinity(0))


def openmp_threads() -> str:
    """Return the size of the pool and the runtimes in this process: two would be two pools."""
    size = re.search(r"omp_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())
    mapped = Path("/proc/self/maps").read_text()
    runtimes = sorted(set(re.findall(r"(/\S*lib(?:gomp|iomp5|omp)\b\S*)", mapped)))
    return f"{size[1] if size else 'unknown'}, {', '.join(runtimes) or 'no runtime loaded'}"


def binding() -> str:
    """Return how threads are bound to cores, or that they are not."""
    found = [f"{name}={os.environ[name]}" for name in BINDINGS if os.environ.get(name)]
    return ", ".join(found) or "none, threads may move between the processors"


def usable_nodes() -> list[str]:
    """Return the NUMA nodes that have processors of this process."""
    usable = os.sched_getaffinity(0)
    lists = sorted(Path("/sys/devices/system/node").glob("node*/cpulist"))
    return [it.parent.name for it in lists if usable & numbers_of(it.read_text())]


def numbers_of(text: str) -> set[int]:
    """Read a list of Linux: ``numbers_of("0-2,8")`` is ``{0, 1, 2, 8}``."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {number for it in ranges for number in range(int(it[0]), int(it[-1]) + 1)}


def usable_cores() -> int:
    """Return the number of cores: two hardware threads of a core count once."""
    siblings = {
        Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text()
        for number in os.sched_getaffinity(0)
    }
    return len(siblings)


def huge_pages() -> str:
    """Return Linux's setting: ``always``, ``madvise`` (for programs that ask) or ``never``."""
    (chosen,) = re.findall(r"\[(\w+)\]", HUGE_PAGES.read_text())
    return str(chosen)


def memory() -> Rows:
    meminfo = Path("/proc/meminfo").read_text()
    kibibytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE))
    return [
        ("total memory", amount(int(kibibytes["MemTotal"]) * 1024)),
        ("available", amount(int(kibibytes["MemAvailable"]) * 1024)),
        ("huge pages", known(huge_pages)),
        ("of freed results", "{} of at most {}".format(*map(amount, foo_ops._C.result_memory()))),
    ]


def devices() -> Rows:
    return [device(index) for index in range(torch.get_device_module("foo").device_count())]


def device(index: int) -> tuple[str, str]:
    foo = torch.get_device_module("foo")
    name = known(lambda: foo.get_device_name(index))
    allocated = known(lambda: amount(foo.memory_allocated(index)))
    return f"foo:{index}", f"{name}, {allocated} allocated"


def kernel_cache() -> Rows:
    """List the compiled kernels, which lie in files ``<kernel>-<dtype>-<hash>.o``."""
    from foo_ops.kernels.compiler.cache import cache_directory

    folder = cache_directory()
    if folder is None:
        return [("folder", "none, as there is no home folder")]
    if not folder.is_dir():
        return [("folder", f"{folder}, which does not exist yet")]
    files = [(path, path.stat()) for path in sorted(folder.glob("*.o"))]
    total = sum(status.st_size for _, status in files)
    return [
        ("folder", f"{folder}, {writable(folder)}"),
        ("compiled", f"{count(len(files), 'kernel')}, {amount(total)}"),
        *(kernel(path.stem, status) for path, status in files),
    ]


def kernel(stem: str, status: os.stat_result) -> tuple[str, str]:
    name, _, variant_and_hash = stem.partition("-")
    variant, _, _hash = variant_and_hash.rpartition("-")
    return f"{name} {variant}", f"{amount(status.st_size)}, {age(time.time() - status.st_mtime)}"


def writable(folder: Path) -> str:
    return "writable" if os.access(folder, os.W_OK | os.X_OK) else "not writable"


def environment() -> Rows:
    rows = [(name, value) for name, value in sorted(os.environ.items()) if VARIABLES.match(name)]
    return rows or [("none", "no FOO_, NUMBA_, OMP_, MKL_ or TORCH variable is set")]


def advice() -> Rows:
    """List what would make operators faster on this machine; docs/threads.md explains each."""
    count, cores, nodes = torch.get_num_threads(), usable_cores(), len(usable_nodes())
    found = []
    if count > cores:
        found.append(
            ("threads", f"{count} threads share {cores} cores: torch.set_num_threads({cores})")
        )
    if nodes > 1:
        found.append(("NUMA nodes", f"start one process on each of the {nodes} nodes"))
    if count >= FEWEST_TO_BIND and not any(os.environ.get(name) for name in BINDINGS):
        found.append(("binding", "bind threads to cores: OMP_PROC_BIND=close OMP_PLACES=cores"))
    if not HUGE_PAGES.exists() or huge_pages() == "never":
        found.append(("huge pages", f"allow them in {HUGE_PAGES}: madvise"))
    return found or [("none", "threads and memory are set up well")]


def amount(size: float) -> str:
    """Write a number of bytes: ``amount(2048)`` is ``2.0 KiB``."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"


def age(seconds: float) -> str:
    """Write a duration in its largest whole unit: ``age(7200)`` is ``2 hours old``."""
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            return f"{count(int(seconds // length), unit)} old"
    return f"{count(max(0, int(seconds)), 'second')} old"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


if __name__ == "__main__":
    print(report())
