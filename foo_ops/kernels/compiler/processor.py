"""Tell what the processor can do that kernels are compiled for."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

import llvmlite.binding as llvm

from foo_ops._switches import switch

# On Linux on x86-64: the system call, what it is asked, and for which registers.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def target() -> tuple[str, str, str]:
    """Return triple, processor and features, those of the host.

    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose others, as they do for Numba.
    """
    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name == "generic" else _features_of_host()
        if "+avx512f" in features.split(","):
            # On Intel's processors LLVM prefers 256 bits, as the first with 512 lowered their
            # clocks: softmax_cross_entropy takes 1.4 times as long with these.
            features += ",-prefer-256-bit"
    return llvm.get_process_triple(), name, features


@functools.cache
def _features_of_host() -> str:
    """Ask LLVM, which takes 0.2 ms; the key of a kernel needs them six times."""
    return llvm.get_host_cpu_features().flatten()


def vector_bits() -> int:
    """Return the width of explicit vectors: FOO_VECTOR_BITS, or the widest that the processor
    has.
    """
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
    """Return the number of vector registers: 32 with AVX-512 and on 64-bit Arm, else 16."""
    triple, _, features = target()
    return 32 if "+avx512f" in features.split(",") or triple.startswith("aarch64") else 16


def fetches_to_first() -> bool:
    """Return whether what is read next is to be fetched to the first cache, or else to the second.

    AMD's processors before Zen 5, whose first cache has 32 KB, have more lines on their way to the
    second at a time. One thread of a Zen 4 reads in GB/s, of 25:

                                        to the first    to the second
        decoding, keys and values, bfloat16        12               20
                                   float32         13               19
        one row of linear, weights, bfloat16       18               23
                                    float16        15               19
                                    int8           13               24
        four rows,                  float16        11               22

    A Zen 5 took 110 us for bags of an embedding with the first cache, and 146 with the second.
    """
    return target()[1] not in ("znver1", "znver2", "znver3", "znver4")


def bytes_ahead() -> int:
    """Return how many bytes of a stream that is read once are to be on their way from memory.

    To the second cache a thread of a Zen 4 reads 20 GB/s of keys and values of bfloat16 with 8 KB,
    23 with 16 and 20 with 32; and of integers of 4 bits, for a row of 1024, 14 GB/s with the 2 KB
    of the next tile and 22 with 8 KB or 16.
    """
    return 8192 if fetches_to_first() else 16384


def has_table_of_registers() -> bool:
    """Whether one instruction picks the lanes of a register by the lanes of another (AVX-512)."""
    return "+avx512f" in target()[2].split(",")


def use_pairs() -> bool:
    """Whether matrix products of bfloat16 are to multiply it in pairs.

    They are where that is quicker than float32. FOO_BFLOAT16_PAIRS=1 makes other processors do the
    same with more instructions, for tests; FOO_BFLOAT16_PAIRS=0 switches it off.
    """
    chosen = switch("FOO_BFLOAT16_PAIRS")
    return _has_quick_dot() if chosen is None else chosen


def use_matrix_unit() -> bool:
    """Whether matrix products are to be cut into tiles of bfloat16 or bytes for a matrix unit
    (AMX).

    FOO_MATRIX_UNIT=1 makes other processors multiply such tiles with vectors, for tests;
    FOO_MATRIX_UNIT=0 switches it off.
    """
    chosen = switch("FOO_MATRIX_UNIT")
    return has_matrix_unit() if chosen is None else chosen


def has_bfloat16_dot() -> bool:
    """Whether the processor has the dot product of pairs of bfloat16 (AVX512-BF16)."""
    return "+avx512bf16" in target()[2].split(",")


def has_integer_dot(lanes: int) -> bool:
    """Whether the processor multiplies so many pairs of int16 and adds each two products."""
    triple, _, features = target()
    needed = {4: "sse2", 8: "avx2", 16: "avx512bw"}[lanes]
    return triple.startswith("x86_64") and (lanes == 4 or f"+{needed}" in features.split(","))


def has_byte_dot(lanes: int) -> bool:
    """Whether the processor multiplies bytes and adds four products to each of the lanes (VNNI)."""
    features = set(target()[2].split(","))
    in_longest = "+avx512vnni" in features
    if lanes == 16:
        return in_longest
    return (in_longest and "+avx512vl" in features) or "+avxvnni" in features


def _has_quick_dot() -> bool:
    """Whether a dot product of pairs is quicker than the two fma that it replaces.

    Zen 4 starts as many dot products as fma, of twice the work; on Sapphire Rapids a dot takes as
    long as four fma.
    """
    return has_bfloat16_dot() and target()[1].startswith("znver")


def has_matrix_unit() -> bool:
    """Whether the processor has a matrix unit for bfloat16 and bytes (AMX), and this process may
    use it.
    """
    has_both = {"+amx-bf16", "+amx-int8"} <= set(target()[2].split(","))
    return has_both and _ask_for_tiles()


@functools.cache
def _ask_for_tiles() -> bool:
    """Ask Linux for the registers of AMX, which it does not give to every process."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
