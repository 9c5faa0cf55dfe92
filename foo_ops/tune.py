"""``python -m foo_ops.tune`` measures which matrix products PyTorch computes faster here.

`foo_ops.linear` and its kind leave some products to PyTorch's libraries, by a table for families of
processors. For a processor of none of them, this program measures for a minute or two, and keeps
a table in the folder of compiled kernels. Processes that start later use it, as long as processor,
torch and foo_ops stay the same. ``FOO_TORCH_PRODUCTS=tuned`` uses it on other processors, too.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import foo_ops
from foo_ops import _C, info
from foo_ops.kernels.compiler.cache import cache_directory

FILE = "tuned_products.json"
FAMILY = "tuned"
ANY = 2**62

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
LAYERS = ((512, 512), (1024, 2816), (2816, 1024))
"""Widths of inputs and outputs."""
ROWS = (9, 16, 32, 64, 128, 256, 512, 1024)
QUICKER = 1.03
"""Least speed of PyTorch relative to ours, for products that it is to compute."""
ROUNDS, SECONDS = 5, 0.004
"""Turns of each way to compute a product, and the time that a turn takes at least."""
FINISHED = ("activation", "gate")
"""Forms that follow that with a bias, but in bfloat16, whose sums PyTorch rounds before them."""


class Products(NamedTuple):
    """Products that PyTorch computes: of a dtype and form, from least_rows to most_rows."""

    dtype: torch.dtype
    form: str
    least_rows: int
    most_rows: int


# --------------------------------------------------------------------------------------- measuring


def forward(input: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return foo_ops.linear(input, weight)


def bias(input: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return foo_ops.linear(input, weight, weight[:, 0].contiguous())


def grad_input(input: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return foo_ops.linear(gradient, weight.mT)


def grad_weight(input: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return foo_ops.linear(gradient.mT, input.mT)


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    it.__name__: it for it in (forward, bias, grad_input, grad_weight)
}
Speeds = Mapping[tuple[torch.dtype, str, int, int], float]
"""PyTorch's speed relative to ours, by dtype, form, rows and number of threads."""


def measure(report: Callable[[str], object]) -> dict[tuple[torch.dtype, str, int, int], float]:
    """Measure all forms, and describe the progress in lines of text."""
    speeds: dict[tuple[torch.dtype, str, int, int], float] = {}
    counts = sorted({1, torch.get_num_threads()})
    for dtype in DTYPES:
        for form in FORMS:
            for threads in counts:
                with torch_threads(threads):
                    of_rows = {rows: speed_of(dtype, form, rows) for rows in ROWS}
                speeds |= {(dtype, form, rows, threads): it for rows, it in of_rows.items()}
                cells = "  ".join(f"{rows}: {speed:.2f}" for rows, speed in of_rows.items())
                name = str(dtype).removeprefix("torch.")
                report(f"{name} {form}, {threads} thread{'s' * (threads > 1)}, rows  {cells}")
    return speeds


def speed_of(dtype: torch.dtype, form: str, rows: int) -> float:
    """Return the geometric mean of PyTorch's speed relative to ours over all layers."""
    return statistics.geometric_mean(
        relative_speed(dtype, form, rows, width, outputs) for width, outputs in LAYERS
    )


def relative_speed(dtype: torch.dtype, form: str, rows: int, width: int, outputs: int) -> float:
    input, weight, gradient = (
        torch.randn(shape).to(dtype) for shape in ((rows, width), (outputs, width), (rows, outputs))
    )
    calls = 1
    ratios = []
    while seconds(form, input, weight, gradient, "none", calls) < SECONDS:
        calls *= 2
    for _ in range(ROUNDS):
        ours, theirs = (
            seconds(form, input, weight, gradient, family, calls) for family in ("none", FAMILY)
        )
        ratios.append(ours / theirs)
    return statistics.median(ratios)


def seconds(
    form: str, input: Tensor, weight: Tensor, gradient: Tensor, family: str, calls: int
) -> float:
    """Return the seconds of some calls; "none" computes products itself, and "tuned" none."""
    compute = FORMS[form]
    with products_of(family), torch.no_grad():
        compute(input, weight, gradient)
        start = time.perf_counter()
        for _ in range(calls):
            compute(input, weight, gradient)
        return time.perf_counter() - start


@contextmanager
def products_of(family: str) -> Iterator[None]:
    before = _C.set_torch_products(family)
    try:
        yield
    finally:
        _C.set_torch_products(before)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------ table


def table_of(speeds: Speeds) -> list[Products]:
    """Return the products that PyTorch computes faster, on all measured numbers of threads."""
    counts = sorted({threads for *_, threads in speeds})
    table = []
    for dtype in DTYPES:
        for form in FORMS:
            chosen = [
                rows
                for rows in ROWS
                if all(speeds[dtype, form, rows, it] >= QUICKER for it in counts)
            ]
            for least, most in stretches(chosen):
                table.append(Products(dtype, form, least, most))
                if form == "bias" and dtype != torch.bfloat16:
                    table += [Products(dtype, it, least, most) for it in FINISHED]
    return table


def stretches(chosen: list[int]) -> list[tuple[int, int]]:
    """Join neighbours; each number of rows stands for those up to the next one of `ROWS`."""
    nexts = dict(zip(ROWS, (*ROWS[1:], ANY + 1)))
    found: list[tuple[int, int]] = []
    for rows in chosen:
        most = nexts[rows] - 1
        if found and found[-1][1] == rows - 1:
            found[-1] = (found[-1][0], most)
        else:
            found.append((rows, most))
    return found


def every_product() -> list[Products]:
    return [Products(dtype, form, 0, ANY) for dtype in DTYPES for form in FORMS]


# ------------------------------------------------------------------------------------------- file


def machine() -> dict[str, str]:
    """Return the facts on which a table depends."""
    return {
        "processor": info.known(info.processor_name),
        "target": info.known(info.llvm_target),
        "torch": torch.__version__,
        "foo_ops": foo_ops.__version__,
    }


def save(table: list[Products]) -> Path:
    folder = cache_directory()
    if folder is None:
        raise OSError("there is no folder for compiled kernels: set FOO_CACHE_DIR")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(str(dtype).removeprefix("torch."), *rest) for dtype, *rest in table]
    path = folder / FILE
    path.write_text(json.dumps({"machine": machine(), "products": rows}, indent=1))
    return path


def load() -> bool:
    """Use the kept table; return whether there is one of this machine."""
    folder = cache_directory()
    path = folder / FILE if folder else None
    if path is None or not path.is_file():
        return False
    try:
        content = json.loads(path.read_text())
        if content["machine"] != machine():
            return False
        _C.set_tuned_products([products_of_row(*row) for row in content["products"]])
    except Exception as error:
        warnings.warn(f"{path} is not used: {type(error).__name__}: {error}", stacklevel=2)
        return False
    return True


def products_of_row(dtype: str, form: str, least_rows: int, most_rows: int) -> Products:
    return Products(getattr(torch, dtype), form, least_rows, most_rows)


def use_kept_table() -> None:
    """Use the kept table on a processor without one, and where FOO_TORCH_PRODUCTS says so."""
    if _C.torch_products() == FAMILY:
        load()
    elif _C.has_no_products_of_torch() and load():
        _C.set_torch_products(FAMILY)


def main(write: Callable[[str], Any] = sys.stdout.write) -> None:
    def report(line: str) -> None:
        write(line + "\n")

    report("PyTorch's speed relative to ours:")
    _C.set_tuned_products(every_product())
    table = table_of(measure(report))
    _C.set_tuned_products(table)
    path = save(table)
    family = _C.torch_products()
    if _C.has_no_products_of_torch() or family == FAMILY:
        use = "processes that start from now on use it"
    else:
        use = f"this processor has a table ({family}); FOO_TORCH_PRODUCTS=tuned uses the new one"
    report(f"{len(table)} rows in {path}: {use}")


if __name__ == "__main__":
    main()
