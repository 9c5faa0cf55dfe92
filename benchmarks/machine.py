"""Facts about the machine that figures of a results file depend on."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

import foo_ops
from benchmarks import peaks
from foo_ops import info
from foo_ops.kernels.compiler.processor import vector_bits


def machine_facts() -> dict[str, str]:
    """Return the facts that the figures depend on."""
    return {
        "processor": info.known(info.processor_name),
        "llvm target": info.known(info.llvm_target),
        "vector units": info.known(info.vector_units),
        "vector bits": str(vector_bits()),
        "processors": str(info.usable_processors()),
        "caches": ", ".join(f"{name} {size >> 10} KiB" for name, size in peaks.caches().items()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "foo_ops": foo_ops.__version__,
        "torch": torch.__version__,
        "numba": importlib.metadata.version("numba"),
        "llvmlite": importlib.metadata.version("llvmlite"),
        "zentorch": version("zentorch"),
        "torchao": version("torchao"),
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
