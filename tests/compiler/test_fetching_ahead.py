"""Kernels prefetch into the cache level that each processor fills faster."""

import platform

import pytest

from foo_ops.kernels.attention.decode import make_decode_kernel
from foo_ops.kernels.compiler import emit
from foo_ops.kernels.linear.few_rows import make_few_rows_kernel

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")

FIRST, SECOND = "prefetcht0", "prefetcht1"
AVX512 = "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
# The three bits that distinguish these instructions.
INSTRUCTIONS = {1: FIRST, 2: SECOND}


def fetching_instructions(code):
    """Return the prefetch instructions in object code: bytes 0f 18, then one for the level."""
    following = [part[:1] for part in code.split(b"\x0f\x18")[1:]]
    return {INSTRUCTIONS.get(byte[0] >> 3 & 7) for byte in following if byte}


@pytest.mark.parametrize(
    "make_kernel", [make_few_rows_kernel, make_decode_kernel], ids=["linear", "attention"]
)
@pytest.mark.parametrize(
    ("processor", "instruction"),
    [("znver3", SECOND), ("znver4", SECOND), ("znver5", FIRST)],
)
def test_cache(processor, instruction, make_kernel, monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", processor)
    code = emit.compile_kernel(lambda: make_kernel("float16"))
    assert fetching_instructions(code) == {instruction}


def test_intel_fetches_streams_to_the_second_with_avx512(monkeypatch):
    """A row's columns are a stream, or come side by side from a cache."""
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx,+avx2,+fma,+f16c")
    code = emit.compile_kernel(lambda: make_decode_kernel("float16"))
    assert fetching_instructions(code) == {FIRST}
    monkeypatch.setenv("NUMBA_CPU_NAME", "sapphirerapids")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", AVX512)
    code = emit.compile_kernel(lambda: make_decode_kernel("float16"))
    assert fetching_instructions(code) == {SECOND}
    code = emit.compile_kernel(lambda: make_few_rows_kernel("float16"))
    assert fetching_instructions(code) == {FIRST, SECOND}


@pytest.mark.parametrize(
    ("processor", "expected"),
    [("znver4", {SECOND}), ("znver5", set()), ("sapphirerapids", set())],
)
def test_what_is_not_converted_is_fetched_to_the_second_alone(processor, expected, monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", processor)
    code = emit.compile_kernel(lambda: make_few_rows_kernel("float32"))
    assert fetching_instructions(code) == expected
