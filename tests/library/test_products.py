"""language.dot and language.add_dot: matrix products of slices of views."""

import re
from pathlib import Path

import pytest
import torch
from support.processes import module, python

from foo_ops import language, library

ROWS, COLUMNS = 5, 70
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SCHEMA = "(Tensor a, Tensor b) -> Tensor"


def type_of(a, b):
    if a.is_floating_point() or b.is_floating_point():
        return torch.promote_types(a.dtype, b.dtype)
    return torch.int32 if max(a.itemsize, b.itemsize) <= 2 else torch.int64


def define(name, kernel, fake=None):
    library.define(f"foo_products::{name}", SCHEMA)
    fake = fake or (lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=type_of(a, b)))
    library.register_fake(f"foo_products::{name}", fake)
    library.register_kernel(f"foo_products::{name}", ("cpu", "foo"), kernel)
    return getattr(torch.ops.foo_products, name)


@library.tile_kernel(tiles=lambda output: 1)
def whole(a, b, output, tiles):
    language.dot(output, a, b)


@library.tile_kernel(tiles=lambda a: (a.shape[0] + ROWS - 1) // ROWS)
def in_tiles(a, b, output, tiles):
    """Multiply in tiles, the last ones smaller, and sum the depth in two halves."""
    half = b.shape[0] // 2
    for tile in tiles:
        i = tile * ROWS
        for j in range(0, b.shape[1], COLUMNS):
            target = output[i : i + ROWS, j : j + COLUMNS]
            language.dot(target, a[i : i + ROWS, :half], b[:half, j : j + COLUMNS])
            language.add_dot(target, a[i : i + ROWS, half:], b[half:, j : j + COLUMNS])


@library.tile_kernel(tiles=lambda output: 1)
def transposed(a, b, output, tiles):
    language.dot(output[:].T, b[:].T, a[:, :].T)


@library.tile_kernel(tiles=lambda a: a.shape[0] * a.shape[2])
def by_heads(a, b, output, tiles):
    """Multiply matrices per head of (batch, length, heads, dim): the scores of attention."""
    heads = a.shape[2]
    for tile in tiles:
        batch, head = tile // heads, tile % heads
        language.dot(output[batch, head, :, :], a[batch, :, head], b[batch, :, head].T)


operators = {
    "whole": define("whole", whole),
    "tiles": define("tiles", in_tiles),
    "transposed": define("transposed", transposed),
    "contiguous": define("contiguous", library.tile_kernel(
        tiles=lambda output: 1, contiguous_rows=True)(whole.function)),
}  # fmt: skip
by_head = define(
    "by_head",
    by_heads,
    lambda a, b: a.new_empty(a.shape[0], a.shape[2], a.shape[1], b.shape[1]),
)

SHAPES = [
    (1, 1, 1),
    (3, 300, 70),
    (4, 16, 16),
    (5, 7, 9),
    (131, 257, 65),
    (7, 513, 129),
    (2, 3, 200),
]
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.T.contiguous().T,
    "strides": lambda x: torch.stack([x, x], -1)[..., 0],
    "odd strides": lambda x: torch.nn.functional.pad(x, (0, 3 - x.shape[1] % 2))[:, : x.shape[1]],
    "expanded": lambda x: x[:1].expand(x.shape),
}


def numbers(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    high = min(info.max, 2**20) + 1
    return torch.randint(max(info.min, -(2**20)), high, shape, generator=generator, dtype=dtype)


def assert_product(result, a, b, name="whole"):
    """Check the error: one rounding of the result, and those of sums of that many products.

    The operator "tiles" rounds the first half of the sum as well.
    """
    assert result.dtype == type_of(a, b)
    if not result.dtype.is_floating_point:
        assert result.equal((a.long() @ b.long()).to(result.dtype))
        return
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    sums = torch.finfo(torch.float64 if result.dtype == torch.float64 else torch.float32)
    own = torch.finfo(result.dtype).eps
    bound = (a.shape[1] + 4) * sums.eps * size + own * exact.abs() + torch.finfo(result.dtype).tiny
    if name == "tiles":
        half = b.shape[0] // 2
        bound = bound + own * (a.double()[:, :half] @ b.double()[:half]).abs()
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", operators)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, name, device):
    rows, depth, columns = shape
    a, b = numbers((rows, depth), dtype), numbers((depth, columns), dtype, 1)
    result = operators[name](a.to(device), b.to(device))
    assert_product(result.cpu(), a, b, name)


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_strides(dtype, first, second):
    for rows, depth, columns in ((9, 259, 21), (3, 33, 17), (4, 35, 3)):
        a, b = numbers((rows, depth), dtype), numbers((depth, columns), dtype, 1)
        a, b = LAYOUTS[first](a), LAYOUTS[second](b)
        assert_product(operators["tiles"](a, b), a, b, "tiles")


PAIRS_OF_DTYPES = [
    *((torch.float32, torch.int8), (torch.int8, torch.bfloat16), (torch.float16, torch.float64)),
    *((torch.bfloat16, torch.float32), (torch.int8, torch.int8), (torch.uint8, torch.int8)),
    *((torch.int16, torch.uint8), (torch.int32, torch.int8), (torch.int64, torch.int64)),
    *((torch.bool, torch.float32), (torch.bfloat16, torch.uint8), (torch.bool, torch.bfloat16)),
]


@pytest.mark.parametrize("dtypes", PAIRS_OF_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["whole", "tiles"])
def test_mixed_dtypes(dtypes, name):
    for rows, depth, columns in ((2, 31, 70), (11, 300, 67)):
        a = numbers((rows, depth), torch.int8).to(dtypes[0])
        b = numbers((depth, columns), torch.int8, 1).to(dtypes[1])
        if not any(dtype.is_floating_point for dtype in dtypes):
            a, b = numbers((rows, depth), dtypes[0]), numbers((depth, columns), dtypes[1], 1)
        assert_product(operators[name](a, b), a, b, name)
        assert_product(operators[name](a, b.T.contiguous().T), a, b, name)


INTEGERS = [
    *((torch.int8, torch.int8), (torch.int8, torch.uint8), (torch.uint8, torch.int8)),
    *((torch.uint8, torch.uint8), (torch.bool, torch.int8), (torch.int16, torch.uint8)),
    *((torch.int16, torch.int16), (torch.uint16, torch.int8)),
]


@pytest.mark.parametrize("dtypes", INTEGERS, ids=str)
def test_integers(dtypes):
    """Also sums of the smallest and largest numbers, which wrap around in 32 bits."""
    first, second = dtypes
    for rows, depth, columns in ((32, 640, 64), (7, 513, 129), (17, 70, 15), (3, 129, 65)):
        a, b = whole_range((rows, depth), first), whole_range((depth, columns), second)
        for layout in (LAYOUTS["rows"], LAYOUTS["columns"]):
            result = operators["whole"](layout(a), layout(b))
            assert_product(result, a, b)


def whole_range(shape, dtype):
    """Return numbers whose first rows and columns are the smallest and largest."""
    if dtype == torch.bool:
        return numbers(shape, torch.int8) > 0
    info = torch.iinfo(dtype)
    result = numbers(shape, torch.int32) % (info.max - info.min + 1) + info.min
    result[:2], result[2], result[:, :2], result[:, 2] = info.min, info.max, info.min, info.max
    return result.to(dtype)


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0), (200, 0, 70)], ids=str)
@pytest.mark.parametrize("name", operators)
def test_empty(shape, name):
    rows, depth, columns = shape
    for dtype in (torch.float32, torch.bfloat16):
        result = operators[name](
            torch.ones(rows, depth).to(dtype), torch.ones(depth, columns).to(dtype)
        )
        assert result.equal(torch.zeros(rows, columns, dtype=dtype))


def test_matrices_of_more_dimensions(device):
    for dtype in FLOATS:
        a, b = numbers((2, 9, 3, 20), dtype), numbers((2, 37, 3, 20), dtype, 1)
        result = by_head(a.to(device), b.to(device)).cpu()
        for batch in range(2):
            for head in range(3):
                assert_product(result[batch, head], a[batch, :, head], b[batch, :, head].T)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinity_and_nan_stay_in_their_rows(dtype):
    a, b = torch.ones(9, 33, dtype=dtype), torch.ones(33, 17, dtype=dtype)
    a[3, 5], a[4, 32], b[2, 7] = torch.inf, torch.nan, torch.inf
    for name, operator in operators.items():
        expected = (a.double() @ b.double()).to(dtype)
        torch.testing.assert_close(operator(a, b), expected, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_beside_a_slice_takes_no_part(dtype):
    """The matrix unit takes whole tiles; the last ones are padded with zeros."""
    for rows, depth, columns in ((32, 270, 40), (48, 15, 64)):
        around = [torch.full((96, 320), torch.nan).to(dtype) for _ in range(2)]
        a, b = around[0][:rows, :depth], around[1].T[:depth, :columns]
        a.copy_(numbers((rows, depth), dtype))
        b.copy_(numbers((depth, columns), dtype, 1))
        assert_product(operators["whole"](a, b), a, b)


def test_every_number_of_threads_gives_the_same():
    a, b = numbers((301, 129), torch.float32), numbers((129, 333), torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(operators["tiles"](a, b))
    finally:
        torch.set_num_threads(before)
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.parametrize(
    "slices",
    ["a[-3:]", "a[:-1]", "a[1:100]", "a[-100:2]", "a[3:1]", "a[2:2, :]", "a[-2:, :]", "a[:, :]"],
)
def test_slices_are_those_of_python(slices):
    """A product with the identity matrix copies the slice."""
    a = numbers((6, 4), torch.float32)
    scope = {"language": language}
    source = f"def kernel(a, b, output, tiles):\n    language.dot(output[:], {slices}, b)\n"
    exec(source, scope)
    kernel = library.tile_kernel(tiles=lambda output: 1)(scope["kernel"])
    expected = eval(slices) @ torch.eye(4)
    name = f"slices{abs(hash(slices))}"
    operator = define(name, kernel, lambda a, b: a.new_empty(expected.shape))
    with library.check_bounds():
        assert operator(a, torch.eye(4)).equal(expected)


def test_sizes_that_do_not_fit(device):
    """Only rows that exist are multiplied; with bounds checks, an error gives the shapes."""
    fits = define("misfit", whole, lambda a, b: a.new_zeros(a.shape[0] + 1, b.shape[1]))
    a, b = torch.ones(3, 4, device=device), torch.ones(5, 6, device=device)
    assert fits(a, b)[:3].equal(torch.full((3, 6), 4.0, device=device))
    message = (
        "misfit: dot: target, a and b must have shapes [m, n], [m, k] and [k, n], "
        "got [4, 6], [3, 4], [5, 6] ("
    )
    with library.check_bounds(), pytest.raises(ValueError, match=re.escape(message)):
        fits(a, b)


def test_an_index_outside():
    @library.tile_kernel(tiles=lambda output: 1)
    def outside(a, b, output, tiles):
        language.dot(output, a[len(tiles) + 1, :, :], b[0, :])

    operator = define("outside", outside, lambda a, b: a.new_empty(a.shape[1], b.shape[2]))
    message = "outside: a[2, 0, 0] is outside of a, which has shape [2, 3, 4] ("
    with library.check_bounds(), pytest.raises(IndexError, match=re.escape(message)):
        operator(torch.ones(2, 3, 4), torch.ones(1, 4, 5))


WRONG = {
    "a[::2]": "a matrix of a with 2 dimensions takes one or two slices without steps, and an index",
    "a[0, 1:2]": "a matrix of a with 2 dimensions takes one or two slices without steps, and an "
    "index",
    "a[:, :, :]": "a matrix of a with 2 dimensions takes one or two slices without steps",
    "a.row(0)": "dot: a must be a view of two dimensions or slices of a view, got Row",
}


@pytest.mark.parametrize("factor", WRONG)
def test_what_is_no_matrix(factor):
    scope = {"language": language}
    exec(f"def kernel(a, b, output, tiles):\n    language.dot(output, {factor}, b)\n", scope)
    kernel = library.tile_kernel(tiles=lambda output: 1)(scope["kernel"])
    operator = define(f"wrong{list(WRONG).index(factor)}", kernel)
    with pytest.raises((RuntimeError, TypeError), match=re.escape(WRONG[factor])):
        operator(torch.ones(3, 3), torch.ones(3, 3))


@pytest.mark.whole
@pytest.mark.parametrize(
    "environment",
    [
        *({"FOO_VECTOR_BITS": "256"}, {"FOO_VECTOR_BITS": "128", "FOO_MATRIX_UNIT": "0"}),
        *({"FOO_BFLOAT16_PAIRS": "0", "FOO_MATRIX_UNIT": "0"}, {"FOO_MATRIX_UNIT": "1"}),
        {"FOO_BFLOAT16_PAIRS": "1", "FOO_MATRIX_UNIT": "0"},
    ],
    ids=str,
)
def test_other_vectors(environment):
    chosen = "test_shapes and cpu and tiles and not float64 or test_integers"
    options = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", chosen)
    process = python(
        module("pytest"), *options, __file__, folder=Path(__file__).parents[2], **environment
    )
    assert process.returncode == 0, process.stdout


def test_a_target_of_integers():
    rounded = define("rounded", whole, lambda a, b: a.new_empty(3, 3, dtype=torch.int32))
    message = "dot: target must be floating-point as the products are, got int32"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        rounded(torch.ones(3, 3), torch.ones(3, 3))
