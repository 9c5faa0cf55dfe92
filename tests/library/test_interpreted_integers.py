"""FOO_INTERPRET=1 computes integers as compiled kernels do: in 64 bits for every dtype.

``python test_interpreted_integers.py FILE DEVICE DTYPE ...`` saves the results of all calls.
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from support.parts import whole
from support.processes import python

from foo_ops import library

DTYPES = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
# `make test` has only these, since each dtype and each pair of them compiles a kernel.
DAILY = (torch.int8, torch.int64, torch.uint8)
NUMBERS = (0, 1, 3, 7, 100, 120, 200, 250, -1, -7, -100)


@library.numba_op("integers::arithmetic")
def arithmetic(a: int, b: int, k: int = 3) -> tuple[int, int, int, int]:
    return (a + b) // 2, (a - b) % 7, a * b >> 8, a * k - b


@library.numba_op("integers::with_constants")
def with_constants(a: int, b: int) -> tuple[int, int, int, int]:
    return a - 250, 250 - b, -a + abs(b), ~a >> 1


@library.numba_op("integers::bits")
def bits(a: int, b: int) -> tuple[int, int, int]:
    return (a ^ b) & 0xFFFF | 1, (a << 3) >> 2, max(a, b) + min(a, b)


@library.numba_op("integers::comparisons")
def comparisons(a: int, b: int) -> tuple[bool, bool, bool]:
    return a - b < 0, a + b > 200, a < b


@library.numba_op("integers::floats")
def floats(a: int, b: int) -> tuple[float, float, float]:
    return (a + b) * 0.5, a / (b * b + 1), float(a) - b


@library.numba_op("integers::mixed")
def mixed(x: float, a: int, b: int) -> tuple[float, float]:
    return x * a, (a + b) * x


library.define("integers::sums", "(Tensor x, Tensor y) -> Tensor")
library.register_fake("integers::sums", lambda x, y: x.new_empty(x.shape, dtype=torch.int64))


@library.register_kernel("integers::sums", ("cpu", "foo"))
@library.tile_kernel
def sums(x, y, output, rows):
    for row in rows:
        for i in range(x.shape[-1]):
            output[row, i] = (x[row, i] + y[row, i]) // 2 + i * x[row, -1] % 5


def numbers(dtype):
    """Return all pairs of numbers of a dtype, as two tensors."""
    limits = torch.iinfo(dtype)
    # Sums of two stay within int64, whose overflow is undefined in compiled code.
    most = min(limits.max, 2**62 - 1)
    fitting = [it for it in (*NUMBERS, most) if limits.min <= it <= limits.max]
    return (torch.tensor(it, dtype=dtype) for it in zip(*itertools.product(fitting, fitting)))


def all_calls(device, dtypes):
    results = {}
    for dtype in dtypes:
        a, b = (it.to(device) for it in numbers(dtype))
        for operator in (arithmetic, with_constants, bits, comparisons, floats):
            results[f"{operator} {dtype}"] = operator(a, b)
    for one, other in itertools.product(dtypes, dtypes):
        a = torch.tensor([[1, 100, 120]], dtype=one, device=device)
        b = torch.tensor([[90, 110, 7]], dtype=other, device=device)
        results[f"sums {one} {other}"] = (torch.ops.integers.sums(a, b),)
        x = torch.tensor([[0.1, 0.2, 0.3]], device=device)
        results[f"mixed {one} {other}"] = mixed(x, a, b)
    return {call: [it.cpu() for it in tensors] for call, tensors in results.items()}


@pytest.mark.parametrize(
    ("device", "dtypes"),
    [("cpu", DAILY), *whole(("cpu", DTYPES), ("foo", DTYPES))],
    ids=["cpu", "cpu-all", "foo-all"],
)
def test_same_integers(device, dtypes, tmp_path):
    file = tmp_path / "results.pt"
    names = [str(it).removeprefix("torch.") for it in dtypes]
    process = python(Path(__file__), file, device, *names, FOO_INTERPRET="1")
    assert process.returncode == 0, process.stderr
    interpreted = torch.load(file)
    for call, expected in all_calls(device, dtypes).items():
        for position, (result, tensor) in enumerate(zip(interpreted[call], expected, strict=True)):
            assert result.dtype == tensor.dtype
            assert torch.equal(result, tensor), f"{call}, result {position}"


if __name__ == "__main__":
    file, device, *names = sys.argv[1:]
    torch.save(all_calls(device, [getattr(torch, name) for name in names]), file)
