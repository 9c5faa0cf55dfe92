"""Scratch memory of tile kernels, per call and per thread: checks and errors."""

import re
from pathlib import Path

import pytest
import torch
from support.processes import run

from foo_ops import language, library

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def lib():
    return library.Library("foo_scratch", "FRAGMENT")


def define(lib, name, kernel, schema="(Tensor input) -> Tensor", fake=torch.empty_like):
    lib.define(f"{name}{schema}")
    library.register_fake(f"foo_scratch::{name}", fake, lib=lib)
    library.register_kernel(f"foo_scratch::{name}", ("cpu", "foo"), kernel, lib=lib)
    return getattr(torch.ops.foo_scratch, name)


def width(input):
    return input.shape[-1]


def parts(input):
    return min(input.rows, 7)


def add_up(output, sums):
    for i in range(output.shape[0]):
        total = language.zero(sums)
        for part in range(sums.shape[0]):
            total += sums[part, i]
        output[i] = total


@library.tile_kernel(
    tiles=parts,
    finish=add_up,
    scratch={"sums": library.scratch(parts, width, like="input", per_call=True)},
)
def column_sum(input, output, sums, tiles):
    count = sums.shape[0]
    for tile in tiles:
        for i in range(input.shape[-1]):
            sums[tile, i] = 0.0
        for row in range(tile * input.rows // count, (tile + 1) * input.rows // count):
            x = input.row(row)
            for i in range(input.shape[-1]):
                sums[tile, i] += x[i]


@library.tile_kernel(
    scratch={
        "copy": library.scratch(width, like="input"),
        "pairs": library.scratch(2, width, like="input"),
    }
)
def reverse(input, output, copy, pairs, rows):
    """Reverse rows, also in place, by way of two scratch tensors."""
    size = input.shape[-1]
    for row in rows:
        x, y = input.row(row), output.row(row)
        for i in range(size):
            copy[i] = x[i]
        for i in range(size):
            pairs[1, i] = copy[size - 1 - i]
            pairs[0, i] = 0.0
        for i in range(size):
            y[i] = pairs[1, i] + pairs[0, i]


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("shape", [(40, 13), (1, 1), (3, 50, 64), (0, 5), (5, 0)], ids=str)
def test_of_a_call(lib, shape, device):
    name = f"column_sum_{device}_{'_'.join(map(str, shape))}"
    operator = define(lib, name, column_sum, fake=lambda x: x.new_empty(x.shape[-1:]))
    for dtype in DTYPES:
        x = torch.randn(shape, dtype=torch.float64).to(dtype)
        expected = x.double().sum(tuple(range(len(shape) - 1)))
        result = operator(x.to(device)).cpu()
        torch.testing.assert_close(result, expected.to(dtype))
        assert torch.equal(result, operator(x.to(device).mT.contiguous().mT).cpu())


def test_sums_are_kept_in_the_compute_type(lib):
    """A sum of ones in bfloat16 would stop at 256."""
    operator = define(lib, "ones", column_sum, fake=lambda x: x.new_empty(x.shape[-1:]))
    assert operator(torch.ones(7000, 2).bfloat16()).tolist() == [7008, 7008]


def test_the_same_for_every_number_of_threads(lib):
    operator = define(lib, "threads", column_sum, fake=lambda x: x.new_empty(x.shape[-1:]))
    x = torch.randn(10_000, 37)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(operator(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_of_each_thread(lib, device):
    operator = define(lib, f"reverse_{device}", reverse)
    for dtype in (*DTYPES, torch.int64, torch.bool):
        x = (torch.randn(2000, 33) * 9).to(dtype)
        assert torch.equal(operator(x.to(device)).cpu(), x.flip(-1))
    assert operator(torch.empty(0, 3, device=device)).shape == (0, 3)


def test_what_nobody_has_written_is_nan_where_accesses_are_checked(lib):
    @library.tile_kernel(scratch={"memory": library.scratch(width, like="input")})
    def unwritten(input, output, memory, rows):
        for row in rows:
            for i in range(input.shape[-1]):
                output[row, i] = memory[i]

    operator = define(lib, "unwritten", unwritten)
    with library.check_bounds():
        assert operator(torch.zeros(2, 5)).isnan().all()
        assert operator(torch.zeros(2, 5, dtype=torch.int64)).eq(-1).all()


@pytest.mark.parametrize("per_call", [True, False])
def test_an_access_outside(lib, per_call):
    @library.tile_kernel(scratch={"memory": library.scratch(3, like="input", per_call=per_call)})
    def beyond(input, output, memory, rows):
        for _ in rows:
            memory[3] = 1.0

    operator = define(lib, f"beyond_{per_call}", beyond)
    message = f"beyond_{per_call}: memory[3] is outside of memory, which has shape [3] ("
    with library.check_bounds(), pytest.raises(IndexError, match=re.escape(message)):
        operator(torch.zeros(2, 5))


def test_rows_of_no_elements(lib):
    """Empty rows are counted, and are in bounds, as in a tensor."""

    @library.tile_kernel(scratch={"memory": library.scratch(3, 0, like="input")})
    def counted(input, output, memory, rows):
        for row in rows:
            last = memory.row(2)
            for i in range(memory.shape[-1]):
                last[i] = 0.0
            output[row, 0] = memory.rows

    operator = define(lib, "counted", counted)
    with library.check_bounds():
        assert operator(torch.zeros(2, 1)).tolist() == [[3], [3]]


@pytest.mark.parametrize("size", [-1, 2**62])
def test_sizes_that_no_memory_has(lib, size):
    @library.tile_kernel(scratch={"memory": library.scratch(2, size, like="input")})
    def sized(input, output, memory, rows):
        output.flat[0] = 0.0

    name = f"sized_{size % 7}"
    operator = define(lib, name, sized)
    reason = "have sizes of at least 0" if size < 0 else "fit into the address space"
    sizes = "" if size < 0 else "sizes "
    message = f"{name}: scratch memory must {reason}, got {sizes}[2, {size}]"
    with pytest.raises(ValueError, match=re.escape(message)):
        operator(torch.zeros(2, 5))


def kernel(input, output, memory, rows):
    pass


def test_wrong_descriptions(lib):
    lib.define("wrong(Tensor input, Tensor? other) -> Tensor")

    def register(function, **options):
        kernel = library.tile_kernel(function, **options)
        library.register_kernel("foo_scratch::wrong", "cpu", kernel, lib=lib)

    def of_two(input, other, output, memory, rows):
        pass

    like_input = {"memory": library.scratch(3, like="input")}
    cases = [
        (lambda: library.scratch(like="x"), "got ()"),
        (lambda: library.scratch(3, "n", like="x"), "one for each dimension, got (3, 'n')"),
        (lambda: library.tile_kernel(kernel, scratch={"memory": 3}), "got {'memory': 3}"),
        (
            lambda: library.tile_kernel(kernel, scratch={"m": like_input["memory"]}),
            "tile_kernel: kernel",
        ),
        (
            lambda: register(of_two, scratch={"memory": library.scratch(3, like="other")}),
            "scratch memory must be like a tensor that is not optional (input, output), got other",
        ),
        (
            lambda: register(of_two, scratch=like_input, finish=lambda memory: None),
            "finish must take arguments that the kernel has (input, other, output), got",
        ),
        (
            lambda: register(of_two, scratch=like_input, tiles=lambda memory: 3),
            "tiles must take arguments that the kernel has (input, other, output), got",
        ),
        (
            lambda: register(kernel, scratch=like_input),
            "its kernel must take 5 arguments (input, other, result, memory, tiles), got",
        ),
    ]
    for case, message in cases:
        with pytest.raises(TypeError, match=re.escape(message)):
            case()


INTERPRETED = """
import sys
sys.path.insert(0, {folder!r})
import torch
import test_scratch
from foo_ops import library
lib = library.Library("foo_scratch", "FRAGMENT")
sums = test_scratch.define(lib, "sums", test_scratch.column_sum,
                           fake=lambda x: x.new_empty(x.shape[-1:]))
reverse = test_scratch.define(lib, "reverse", test_scratch.reverse)
x = torch.arange(60.0).view(20, 3).bfloat16()
assert sums(x).tolist() == x.float().sum(0).bfloat16().tolist()
assert torch.equal(reverse(x), x.flip(-1))
"""


def test_interpreted(tmp_path):
    program = INTERPRETED.format(folder=str(Path(__file__).parent))
    run(program, tmp_path, FOO_INTERPRET="1")
