"""Products prefetch each line of the next panel once, and only on some processors bit by bit."""

import pytest
import torch

from foo_ops.kernels.compiler.processor import spreads_prefetches
from foo_ops.kernels.linear.packing import make_lines_ahead, share_of_lines
from foo_ops.kernels.products.on_vectors import make_tall_matmul, tall_shape
from foo_ops.kernels.simd.memory import CACHE_LINE, address_of, pointer_to, shift, store
from foo_ops.kernels.simd.types import lanes_of

SIZE = 4
AVX512 = "+avx512f,+avx512vl"


def lines_of_shares(compiled, chunk, row_stride, step_stride, rows, steps, shares):
    """Return the offsets of all lines, in bytes, as products prefetch them."""
    lines_ahead = make_lines_ahead(chunk, SIZE)
    numbers, offsets = pointer_to("float32"), pointer_to("int64")

    def collect(source, row_stride, step_stride, rows, steps, shares, target, size):
        ahead = lines_ahead(numbers(source), row_stride, step_stride, rows, steps, shares)
        found = 0
        # More shares than there are: the rows that are no whole band have none.
        for share in range(shares + 1):
            place, count, stride, lines, chunks, distance = share_of_lines(ahead, share)
            for number in range(chunks):
                first = address_of(shift(place, number * distance)) - source
                for row in range(count):
                    for line in range(lines):
                        store(offsets(target), 1 + found, first + row * stride + line * CACHE_LINE)
                        found += 1
        store(offsets(target), 0, found)

    source = torch.zeros(1)
    target = torch.full((4096,), -1, dtype=torch.int64)
    sizes = row_stride, step_stride, rows, steps, shares
    compiled(collect)(source.data_ptr(), *sizes, target.data_ptr(), len(target))
    return target[1 : 1 + target[0]].tolist()


@pytest.mark.parametrize("chunk", [32, 192], ids=["spread", "at once"])
@pytest.mark.parametrize(("rows", "shares"), [(32, 1), (32, 5), (32, 43), (7, 3)])
@pytest.mark.parametrize("steps", [192, 64, 40, 0])
def test_lines_of_columns(compiled, chunk, rows, shares, steps):
    found = lines_of_shares(compiled, chunk, 1000, 1, rows, steps, shares)
    # Whole chunks: the last one may reach beyond the steps.
    length = min(chunk, steps)
    ends = -(-steps // chunk) * length if length else 0
    expected = [
        row * 1000 * SIZE + byte
        for row in range(rows)
        for byte in range(0, ends * SIZE, CACHE_LINE)
    ]
    assert sorted(found) == expected


@pytest.mark.parametrize("chunk", [32, 192], ids=["spread", "at once"])
@pytest.mark.parametrize("shares", [1, 5, 43])
@pytest.mark.parametrize("rows", [32, 20])
def test_lines_of_adjacent_columns(compiled, chunk, shares, rows):
    steps = 64
    found = lines_of_shares(compiled, chunk, 1, 1000, rows, steps, shares)
    expected = [
        step * 1000 * SIZE + byte
        for step in range(steps)
        for byte in range(0, rows * SIZE, CACHE_LINE)
    ]
    assert sorted(found) == expected


@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        ("cascadelake", AVX512, True),
        ("sapphirerapids", AVX512, True),
        ("znver4", AVX512, False),
        ("haswell", "+avx2", False),
    ],
)
def test_processors(name, features, expected, monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", name)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    assert spreads_prefetches() == expected


@pytest.mark.parametrize("rows", [1, 5, 12, 31])
@pytest.mark.parametrize(("steps", "are_adjacent"), [(192, True), (50, True), (50, False)])
@pytest.mark.parametrize("row_stride", [192, 200])
@pytest.mark.parametrize("columns", [1, 2])
def test_products_that_prefetch(compiled, rows, steps, are_adjacent, row_stride, columns):
    """Chunks of steps, copied rows at a constant distance and others: all give the same product."""
    lanes, band = lanes_of("float32"), tall_shape()[0]
    width = columns * lanes
    lines_ahead, matmul = make_lines_ahead(32, SIZE), make_tall_matmul(*["float32"] * 3, 32, 192)
    numbers = pointer_to("float32")

    def multiply(c, a, a_row, a_step, b, width, rows, steps):
        source = numbers(b)
        lines = share_of_lines(lines_ahead(source, width, 1, 2, 64, 1), 0)
        matmul(
            numbers(c), width, numbers(a), a_row, a_step, source, width, rows, width, steps, True,
            lines,
        )  # fmt: skip

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, steps, generator=generator)
    b, c = (torch.randn(size, width, generator=generator) for size in (steps, rows))
    expected = c.double() + a.double() @ b.double()
    if are_adjacent:
        stored = torch.zeros(rows, row_stride)
        stored[:, :steps] = a
        strides = row_stride, 1
    else:
        rows = min(rows, band)
        stored = torch.zeros(steps, band)
        stored[:, :rows] = a[:rows].T
        strides = 1, band
    compiled(multiply)(c.data_ptr(), stored.data_ptr(), *strides, b.data_ptr(), width, rows, steps)
    torch.testing.assert_close(c[:rows].double(), expected[:rows], rtol=0, atol=1e-4)
