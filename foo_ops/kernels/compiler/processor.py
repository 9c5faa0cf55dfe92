"""The features of the processor that kernels are compiled for."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

import llvmlite.binding as llvm

from foo_ops._process import switch

# On Linux on x86-64: the system call, its request, and the registers requested.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def target() -> tuple[str, str, str]:
    """Return triple, processor and features: the host's, by default.

    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose others, as for Numba.
    """
    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name == "generic" else _features_of_host()
        if "+avx512f" in features.split(","):
            # On Intel's processors LLVM prefers 256 bits, since the first ones with 512 lowered
            # their clocks: softmax_cross_entropy takes 1.4 times as long with 256.
            features += ",-prefer-256-bit"
    return llvm.get_process_triple(), name, features


@functools.cache
def _features_of_host() -> str:
    """Return the host's features, cached: LLVM takes 0.2 ms, and a kernel's key needs six calls."""
    return llvm.get_host_cpu_features().flatten()


def vector_bits() -> int:
    """Return the width of explicit vectors: FOO_VECTOR_BITS, or the processor's widest."""
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
    """Whether kernels prefetch rows that they look up into L1; otherwise into L2.

    AMD's processors before Zen 5, with 32 KB of L1, can fetch more lines into L2 at a time. For
    bags of an embedding, a Zen 5 took 110 us with L1, and 146 with L2; a Granite Rapids 2.0 ms and
    2.7.
    """
    return target()[1] not in ("znver1", "znver2", "znver3", "znver4")


def fetches_streams_to_first() -> bool:
    """Whether kernels prefetch what they read in order into L1; otherwise into L2.

    One thread reads in GB/s, a Zen 4 of 25, a Granite Rapids of 15:

                                              Zen 4              Granite Rapids
                                         into L1   into L2     into L1   into L2
        decoding, keys and values,
                               bfloat16       12        20         8.9       9.7
                               float32        13        19        10.2      12.3
        one row of linear, weights,
                               bfloat16       18        23        11.4      13.6
                               float16        15        19
                               int8           13        24        10.6      11.8
        four rows,             float16        11        22         7.9      12.1
    """
    return fetches_to_first() and not _is_intel_with_avx512()


def bytes_ahead() -> int:
    """Return how many bytes ahead to prefetch, in a stream that is read once.

    Prefetching into L2, a thread of a Zen 4 reads 20 GB/s of bfloat16 keys and values with 8 KB, 23
    with 16 KB and 20 with 32 KB; of 4-bit integers, for a row of 1024, 14 GB/s with the 2 KB of the
    next tile, and 22 with 8 KB or 16 KB. A Granite Rapids reads 13.9 GB/s of bfloat16 weights with
    8 KB, 13.2 with 16 KB.
    """
    return 8192 if fetches_to_first() else 16384


def reads_one_stream() -> bool:
    """Whether one row reads the columns of weights one after the other, not some side by side.

    Columns side by side are streams of their own, of which one that is read in order is the fastest
    on Intel's processors. A thread of a Granite Rapids reads in GB/s, of 15, weights from memory:

                                         4 columns   2 columns   one
        bfloat16                              13.9        14.9  15.0
        int8, rows of 8 bits                  13.4        13.6  13.1
        int4 in groups of 128                 10.3         9.9  11.7
          with huge pages                     10.9        10.6  14.4

    and two threads 26.7, 28.6 and 29.1 of bfloat16. On a Zen 4, 8 columns were the fastest:
    `COLUMNS_OF_ROW`.
    """
    return _is_intel_with_avx512()


def spreads_prefetches() -> bool:
    """Whether matrix products prefetch bit by bit; otherwise, all that a band of rows has to first.

    A core of Intel's has 10 to 16 buffers for lines that it waits for, also if they only go to L2.
    More prefetches than that wait for buffers, and all that follows for them: a Cascade Lake spent
    7 % of the time of 1024 rows in the loop of prefetches. For 64 rows it has seven times as many
    between two bands. On a Zen 4, 1024 rows take 1.01 of the time if prefetches are spread.
    """
    return _is_intel_with_avx512()


def _is_intel_with_avx512() -> bool:
    triple, name, features = target()
    has_avx512 = triple.startswith("x86_64") and "+avx512f" in features.split(",")
    return has_avx512 and not name.startswith("znver")


def has_masks() -> bool:
    """Whether one instruction loads some lanes of a vector of any dtype (AVX512BW)."""
    return "+avx512bw" in target()[2].split(",")


def has_table_of_registers() -> bool:
    """Whether one instruction permutes a register's lanes by another register (AVX-512)."""
    return "+avx512f" in target()[2].split(",")


def use_pairs() -> bool:
    """Whether matrix products multiply bfloat16 in pairs, where that is faster than float32.

    FOO_BFLOAT16_PAIRS=1 makes other processors compute the same with more instructions, for tests;
    FOO_BFLOAT16_PAIRS=0 switches pairs off.
    """
    chosen = switch("FOO_BFLOAT16_PAIRS")
    return _has_quick_dot() if chosen is None else chosen


def use_matrix_unit() -> bool:
    """Whether matrix products use register tiles of bfloat16 or bytes, for a matrix unit (AMX).

    FOO_MATRIX_UNIT=1 makes other processors multiply such tiles with vectors, for tests;
    FOO_MATRIX_UNIT=0 switches them off.
    """
    chosen = switch("FOO_MATRIX_UNIT")
    return has_matrix_unit() if chosen is None else chosen


def has_bfloat16_dot() -> bool:
    """Whether the processor has the dot product of pairs of bfloat16 (AVX512-BF16)."""
    return "+avx512bf16" in target()[2].split(",")


def has_integer_dot(lanes: int) -> bool:
    """Whether the processor has a dot product of int16 pairs in ``lanes`` lanes."""
    triple, _, features = target()
    needed = {4: "sse2", 8: "avx2", 16: "avx512bw"}[lanes]
    return triple.startswith("x86_64") and (lanes == 4 or f"+{needed}" in features.split(","))


def has_byte_dot(lanes: int) -> bool:
    """Whether the processor has a dot product of four bytes in ``lanes`` lanes (VNNI)."""
    features = set(target()[2].split(","))
    in_longest = "+avx512vnni" in features
    if lanes == 16:
        return in_longest
    return (in_longest and "+avx512vl" in features) or "+avxvnni" in features


def has_byte_shuffle(size: int) -> bool:
    """Whether one instruction looks up each byte of ``size`` in a table of 16."""
    triple, _, features = target()
    needed = {16: "ssse3", 32: "avx2", 64: "avx512bw"}[size]
    return triple.startswith("x86_64") and f"+{needed}" in features.split(",")


def has_float_shuffle(lanes: int) -> bool:
    """Whether one instruction looks up ``lanes`` float32 in a table of as many."""
    triple, _, features = target()
    needed = {8: "avx2", 16: "avx512f"}.get(lanes)
    return triple.startswith("x86_64") and f"+{needed}" in features.split(",")


def _has_quick_dot() -> bool:
    """Whether a dot product of pairs is faster than the two fma that it replaces.

    Zen 4 issues dot products at the rate of fma, with twice the work; on Sapphire Rapids a dot
    product takes as long as four fma.
    """
    return has_bfloat16_dot() and target()[1].startswith("znver")


def has_matrix_unit() -> bool:
    """Whether this process may use a matrix unit for bfloat16 and bytes (AMX)."""
    has_both = {"+amx-bf16", "+amx-int8"} <= set(target()[2].split(","))
    return has_both and _ask_for_tiles()


@functools.cache
def _ask_for_tiles() -> bool:
    """Request the registers of AMX from Linux; return whether the process may use them."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
