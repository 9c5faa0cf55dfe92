"""Tile kernels that check contents themselves, and return False to refuse them."""

import re

import pytest
import torch

from foo_ops import library

DEVICES = ("cpu", "foo")
SIGNATURE = "(Tensor input, Tensor index)"


def picked(input, index, output, places):
    for place in places:
        i = index.flat[place]
        if not 0 <= i < input.size:
            return False
        output.flat[place] = input[i]
    return True


def refuse_picked(input, index):
    wrong = index[(index < 0) | (index >= input.shape[0])]
    raise IndexError(f"picked: index must be in [0, {input.shape[0]}), got {wrong[0].item()}")


def finish_picked(output):
    output.flat[0] += 100


def fake_of_picked(input, index, **out):
    return input.new_empty(index.shape)


@pytest.fixture(scope="module")
def lib():
    lib = library.Library("foo_late", "FRAGMENT")
    lib.define(f"pick{SIGNATURE} -> Tensor")
    lib.define(f"pick.out{SIGNATURE[:-1]}, *, Tensor(a!) out) -> Tensor(a!)")
    library.register_fake("foo_late::pick", fake_of_picked, lib=lib)
    lib.define(f"silent{SIGNATURE} -> Tensor")
    library.register_fake("foo_late::silent", fake_of_picked, lib=lib)
    options = {"tiles": lambda index: index.size, "finish": finish_picked}
    kernel = library.tile_kernel(picked, refuse=refuse_picked, **options)
    for name in ("pick", "pick.out"):
        library.register_kernel(f"foo_late::{name}", DEVICES, kernel, lib=lib)
    silent = library.tile_kernel(picked, refuse=lambda index: None, **options)
    library.register_kernel("foo_late::silent", DEVICES, silent, lib=lib)
    return lib


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wrong", [0, 70_001, 99_999])
def test_a_tile_refuses_for_all(wrong, threads, lib, device):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        input = torch.arange(5.0, device=device)
        index = torch.arange(100_000, device=device) % 5
        expected = input[index].cpu()
        expected[0] += 100
        assert torch.equal(torch.ops.foo_late.pick(input, index).cpu(), expected)
        index[wrong] = -3
        message = r"\Apicked: index must be in \[0, 5\), got -3\Z"
        for _ in range(2):
            with pytest.raises(IndexError, match=message):
                torch.ops.foo_late.pick(input, index)
        index[wrong] = wrong % 5
        assert torch.equal(torch.ops.foo_late.pick(input, index).cpu(), expected)
    finally:
        torch.set_num_threads(before)


def test_what_is_refused_writes_nothing_to_out(lib, device):
    input = torch.arange(5.0, device=device)
    out = torch.full((3,), 7.0, device=device)
    index = torch.tensor([4, 0, 5], device=device)
    with pytest.raises(IndexError, match=r"got 5\Z"):
        torch.ops.foo_late.pick(input, index, out=out)
    assert out.tolist() == [7, 7, 7]
    index[2] = 1
    assert torch.ops.foo_late.pick(input, index, out=out) is out
    assert out.tolist() == [104, 0, 1]


def test_no_tiles(lib, device):
    index = torch.empty(0, dtype=torch.int64, device=device)

    def nothing(input, index, output, tiles):
        return False

    kernel = library.tile_kernel(nothing, tiles=lambda index: index.size, refuse=refuse_picked)
    name = f"nothing_{device}"
    lib.define(f"{name}{SIGNATURE} -> Tensor")
    library.register_fake(f"foo_late::{name}", fake_of_picked, lib=lib)
    library.register_kernel(f"foo_late::{name}", device, kernel, lib=lib)
    result = getattr(torch.ops.foo_late, name)(torch.ones(2, device=device), index)
    assert result.shape == (0,)


def test_refuse_that_raises_nothing(lib, device):
    message = r"refuse must raise an error if the kernel returns False, got none\Z"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.foo_late.silent(torch.ones(2, device=device), torch.tensor([2], device=device))


def returns_nothing(input, index, output, places):  # noqa: RET503
    for place in places:
        if index[place] < 0:
            return False


def returns_two(input, index, output, places):
    return True, False


def test_a_verdict_is_one_value():
    head = (
        "a tile kernel with refuse and without check must return True, or False to refuse its "
        "arguments, got "
    )
    for function, what in ((returns_nothing, "nothing"), (returns_two, "2 values")):
        match = rf"\A{re.escape(head)}.*{function.__name__}.* returns {what} in line \d+\Z"
        with pytest.raises(TypeError, match=match):
            library.tile_kernel(function, refuse=refuse_picked)


@pytest.mark.parametrize(
    ("schema", "function", "what"),
    [
        (
            "(Tensor(a!) input, Tensor index) -> ()",
            lambda input, index, places: True,
            "input, which is written",
        ),
        (
            "(Tensor input, Generator? index) -> Tensor",
            lambda input, index, output, places: True,
            "index, which is drawn from",
        ),
    ],
)
def test_nothing_that_cannot_be_taken_back(schema, function, what, lib):
    name = f"late_{what[:5]}"
    lib.define(f"{name}{schema}", tags=torch.Tag.nondeterministic_seeded)
    kernel = library.tile_kernel(function, refuse=lambda input: None)
    message = (
        f"foo_late::{name}: a kernel that returns False to refuse its arguments must write to no "
        f"argument and draw no random numbers, got {what}; use check="
    )
    with pytest.raises(TypeError, match=rf"\A{re.escape(message)}\Z"):
        library.register_kernel(f"foo_late::{name}", "cpu", kernel, lib=lib)


def test_a_dtype_is_that_of_python(lib, device):
    name = f"cast_on_{device}"
    lib.define(f"{name}(Tensor input, ScalarType dtype) -> Tensor")

    @library.register_fake(f"foo_late::{name}", lib=lib)
    def fake(input, dtype):
        return input.new_empty(input.shape, dtype=dtype)

    def refuse(input, dtype):
        raise ValueError(f"cast: input must be positive for {dtype}, got {input.min().item()}")

    @library.tile_kernel(refuse=refuse)
    def cast(input, dtype, output, rows):
        for row in rows:
            for column in range(input.shape[1]):
                if input[row, column] <= 0:
                    return False
                output[row, column] = input[row, column]
        return True

    library.register_kernel(f"foo_late::{name}", DEVICES, cast, lib=lib)
    operator = getattr(torch.ops.foo_late, name)
    input = torch.ones(2, 3, device=device)
    assert operator(input, torch.float64).dtype == torch.float64
    message = r"\Acast: input must be positive for torch.float64, got -1.0\Z"
    with pytest.raises(ValueError, match=message):
        operator(-input, torch.float64)
