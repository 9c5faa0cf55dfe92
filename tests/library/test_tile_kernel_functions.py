"""Tile kernels run beside other threads, and with functions that check, refuse and finish."""

import re
import threading
import time

import pytest
import torch

from foo_ops import language, library

DEVICES = ("cpu", "foo")


pytestmark = pytest.mark.usefixtures("one_thread")


def wait_for_flag(progress, flag, rows):
    for _ in rows:
        count = 0
        # Ten seconds at most. The write forces LLVM to read the flag again.
        while flag[0] == 0 and count < 2**33:
            count += 1
            progress[0] = count
        progress[1] = flag[0]


def test_kernels_run_without_the_gil(device):
    """Another Python thread runs: it raises the flag when the kernel has begun."""
    name = f"foo_tile::wait_{device}_"
    library.define(name, "(Tensor(a!) progress, Tensor flag) -> ()")
    library.register_fake(name, lambda progress, flag: None)
    kernel = library.tile_kernel(wait_for_flag, tiles=lambda: 1)
    library.register_kernel(name, device, kernel)
    wait = getattr(torch.ops.foo_tile, f"wait_{device}_")
    progress = torch.zeros(2, dtype=torch.int64, device=device)
    flag = torch.ones(1, dtype=torch.int64, device=device)
    # Compiles the kernel.
    wait(progress, flag)
    assert progress.tolist() == [0, 1]
    flag.zero_()

    def raise_flag():
        while progress[0].item() == 0:
            time.sleep(0.001)
        flag.fill_(1)

    thread = threading.Thread(target=raise_flag)
    thread.start()
    wait(progress, flag)
    thread.join()
    assert progress[1].item() == 1


# Contents that a kernel checks.


def picked(input, index, output, rows):
    for row in rows:
        output.flat[row] = input[index.flat[row]]


def picked_in_range(index, input):
    for row in range(index.size):
        if index.flat[row] < 0 or index.flat[row] >= input.size:
            return False
    return True


def refuse_picked(error):
    def refuse(input, index):
        raise error(f"picked: index must be in [0, {input.shape[0]}), got {index.max().item()}")

    return refuse


def define_picked(name, refuse):
    library.define(f"foo_tile::{name}", "(Tensor input, Tensor index) -> Tensor")
    library.register_fake(f"foo_tile::{name}", lambda input, index: input.new_empty(index.shape))
    kernel = library.tile_kernel(
        picked,
        tiles=lambda index: index.size,
        check=picked_in_range,
        refuse=refuse,
    )
    library.register_kernel(f"foo_tile::{name}", DEVICES, kernel)
    return getattr(torch.ops.foo_tile, name)


@pytest.mark.parametrize("error", [ValueError, IndexError, TypeError, RuntimeError])
def test_a_check_refuses_what_tensors_contain(error, device):
    name = f"picked_{device[:3]}_{error.__name__}"
    operator = define_picked(name, refuse_picked(error))
    input = torch.arange(5.0, device=device)
    assert operator(input, torch.tensor([4, 0], device=device)).tolist() == [4, 0]
    for _ in range(2):
        with pytest.raises(error, match=r"\Apicked: index must be in \[0, 5\), got 7\Z") as caught:
            operator(input, torch.tensor([1, 7], device=device))
        assert type(caught.value) is error
    assert operator(input, torch.empty(0, dtype=torch.int64, device=device)).shape == (0,)


def test_refuse_that_raises_nothing():
    operator = define_picked("picked_silent", lambda input, index: None)
    message = "picked_silent: refuse must raise an error if the check returns False, got none"
    with pytest.raises(RuntimeError, match=rf"\A{message}\Z"):
        operator(torch.ones(2), torch.tensor([2]))


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_negative_number_of_tiles(is_checked, device):
    """Not a refusal: the differences of zero elements count -1 tiles."""
    name = f"differences_{is_checked}_{device[:3]}"
    library.define(f"foo_tile::{name}", "(Tensor input) -> Tensor")
    library.register_fake(
        f"foo_tile::{name}", lambda input: input.new_empty(max(input.shape[0] - 1, 0))
    )

    def differences(input, output, tiles):
        for tile in tiles:
            output[tile] = input[tile + 1] - input[tile]

    options = {"check": lambda input: True, "refuse": lambda input: None} if is_checked else {}
    kernel = library.tile_kernel(differences, tiles=lambda input: input.shape[0] - 1, **options)
    library.register_kernel(f"foo_tile::{name}", DEVICES, kernel)
    operator = getattr(torch.ops.foo_tile, name)
    assert operator(torch.tensor([1.0, 3.0, 4.0], device=device)).tolist() == [2.0, 1.0]
    message = rf"\A{name}: tiles must return a number of at least 0, got -1\Z"
    with pytest.raises(ValueError, match=message):
        operator(torch.empty(0, device=device))


def test_check_comes_with_refuse():
    message = r"\Atile_kernel: check must be given together with refuse, which raises the error\Z"
    with pytest.raises(TypeError, match=message):
        library.tile_kernel(picked, check=picked_in_range)


@pytest.mark.parametrize("name", ["tiles", "finish", "check", "refuse"])
def test_other_functions_take_what_the_kernel_takes(name):
    library.define(f"foo_tile::wrong_{name}", "(Tensor input, Tensor index) -> Tensor")
    options = {"check": picked_in_range, "refuse": refuse_picked(ValueError)}
    options[name] = lambda index, rows: True
    kernel = library.tile_kernel(picked, **options)
    arguments = "input, index" if name == "refuse" else "input, index, output"
    message = f"foo_tile::wrong_{name}: {name} must take arguments that the kernel has ({arguments}"
    with pytest.raises(TypeError, match=rf"\A{re.escape(message)}\), got rows in "):
        library.register_kernel(f"foo_tile::wrong_{name}", "cpu", kernel)


# A finish function combines all tiles.


def row_sums(input, sums, total, rows):
    for row in rows:
        sums.flat[row] = language.zero(sums)
        for i in range(input.shape[-1]):
            sums.flat[row] += input.row(row)[i]


def sum_of_sums(total, sums):
    total.flat[0] = language.zero(total)
    for row in range(sums.size):
        total.flat[0] += sums.flat[row]


@pytest.fixture(scope="module")
def sums_and_total():
    library.define("foo_tile::sums_and_total", "(Tensor input) -> (Tensor sums, Tensor total)")

    @library.register_fake("foo_tile::sums_and_total")
    def fake(input):
        sums = input.new_empty(input.shape[:-1])
        return sums, sums.new_empty(())

    kernel = library.tile_kernel(row_sums, finish=sum_of_sums)
    library.register_kernel("foo_tile::sums_and_total", DEVICES, kernel)
    return torch.ops.foo_tile.sums_and_total.default


@pytest.mark.parametrize("shape", [(5,), (4, 3), (0, 3), (3, 0), (2000, 50)], ids=str)
def test_finish_comes_after_all_tiles(sums_and_total, shape, device):
    input = torch.randint(-9, 9, shape).double()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        sums, total = sums_and_total(input.to(device))
        assert torch.equal(sums.cpu(), input.sum(-1))
        assert total.item() == input.sum()
