"""The processor that kernels are compiled for."""

from __future__ import annotations

import os

import llvmlite.binding as llvm


def target() -> tuple[str, str, str]:
    """Triple, processor and features, those of the host.

    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose others, as they do for Numba.
    """
    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name == "generic" else llvm.get_host_cpu_features().flatten()
    return llvm.get_process_triple(), name, features


def vector_bits() -> int:
    """Width of explicit vectors: FOO_VECTOR_BITS, or the widest that the processor has."""
    chosen = os.environ.get("FOO_VECTOR_BITS")
    if chosen:
        if chosen not in ("128", "256", "512"):
            raise ValueError(f"FOO_VECTOR_BITS must be 128, 256 or 512, got {chosen}")
        return int(chosen)
    features = target()[2].split(",")
    if "+avx512f" in features:
        return 512
    return 256 if "+avx" in features else 128


def vector_registers() -> int:
    """Number of vector registers: 32 with AVX-512 and on 64-bit Arm, else 16."""
    triple, _, features = target()
    return 32 if "+avx512f" in features.split(",") or triple.startswith("aarch64") else 16


def multiplies_pairs() -> bool:
    """Whether matrix products of bfloat16 are to multiply it in pairs.

    They are where one instruction does that (AVX512-BF16). FOO_BFLOAT16_PAIRS=1 makes other
    processors do the same with more instructions, for tests; FOO_BFLOAT16_PAIRS=0 switches it off.
    """
    chosen = os.environ.get("FOO_BFLOAT16_PAIRS")
    if chosen and chosen not in ("0", "1"):
        raise ValueError(f"FOO_BFLOAT16_PAIRS must be 0 or 1, got {chosen}")
    return chosen == "1" if chosen else has_bfloat16_dot()


def has_bfloat16_dot() -> bool:
    """Whether the processor has the dot product of pairs of bfloat16 (AVX512-BF16)."""
    return "+avx512bf16" in target()[2].split(",")
