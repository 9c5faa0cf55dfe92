"""Messages for kernels with unsupported code: the replacement to write, and the line."""

import functools
import itertools
import math
import random
import re
import statistics
from math import fsum as exact_sum

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from foo_ops import language, library

serial = itertools.count()


def helper(row):
    total = 0.0
    return total + torch.logsumexp(row, 0)


SCOPE = {
    "F": F,
    "functools": functools,
    "language": language,
    "math": math,
    "np": np,
    "random": random,
    "statistics": statistics,
    "torch": torch,
    "exact_sum": exact_sum,
    "helper": helper,
}
LOOP = "for i in range(x.shape[-1])"
SUM = f"write a loop, {LOOP}: total = language.accumulate(total, x[i])"
SCRATCH = "scratch memory (library.scratch)"
ROW = f"compute with its elements, {LOOP}: ... row[i] ..."
DOT = "language.dot(target, a, b) multiplies matrices"
FLAT = "compute with its elements, for i in range(x.size): ... x.flat[i] ..."
SLICE = f"compute with its elements, {LOOP}: ... x[r, i] ..."
CONSTANT = "a kernel is compiled for each dtype and number of dimensions; x.ndim is a constant"


def calls(words, advice=""):
    return f"a kernel cannot call {words}" + (f": {advice}" if advice else "")


# In a tile kernel of x and y, two dimensions each, in a loop over rows r.
TILES = {
    # Functions of PyTorch, NumPy and Python, however they are named.
    "torch.tanh(x[r, 0])": calls("torch.tanh", "write math.tanh(x)"),
    "torch.special.gammaln(x[r, 0])": calls("torch.special.gammaln", "write math.lgamma(x)"),
    "np.arctan2(x[r, 0], 2.0)": calls("np.arctan2", "write math.atan2(x, y)"),
    "np.clip(x[r, 0], 0.0, 1.0)": calls("np.clip", "write min(max(x, low), high)"),
    "F.silu(x[r, 0])": calls("F.silu", "write x / (1 + math.exp(-x))"),
    "F.softmax(x.row(r), 0)[0]": calls(
        "F.softmax",
        f"write a loop, {LOOP}: total = language.accumulate(total, math.exp(x[i] - largest))",
    ),
    "torch.where(x[r, 0] > 0, 1.0, 2.0)": calls("torch.where", "write a if condition else b"),
    "torch.celu(x[r, 0])": calls("torch.celu"),
    "math.comb(5, r)": calls("math.comb"),
    "exact_sum(x.row(r))": calls("exact_sum", SUM),
    "sum(x.row(r))": calls("sum on a row", SUM),
    "np.mean(x.row(r))": calls("np.mean", f"{SUM}, then divide by the size"),
    "statistics.fmean(x.row(r))": calls("statistics.fmean", f"{SUM}, then divide by the size"),
    "min(x)": calls(
        "min on a tensor", "write a loop, for i in range(x.size): least = min(least, x[i])"
    ),
    "all(x.row(r))": calls("all", f"write a loop, {LOOP}: found = found or x[i] > 0"),
    "any(x[r, i] > 0 for i in range(3))": calls(
        "any", f"write a loop, {LOOP}: found = found or x[i] > 0"
    ),
    "functools.reduce(max, x.row(r))": calls(
        "functools.reduce", f"write a loop, {LOOP}: total = f(total, x[i])"
    ),
    "sorted(x.row(r))[0]": calls("sorted", f"write a loop that sorts, in {SCRATCH}"),
    "torch.topk(x.row(r), 2)[0][0]": calls("torch.topk", f"write a loop that sorts, in {SCRATCH}"),
    "np.zeros(4)[0]": calls("np.zeros", f"use {SCRATCH}"),
    "torch.empty_like(x)[0, 0]": calls("torch.empty_like", f"use {SCRATCH}"),
    "list(map(math.exp, x.row(r)))[0]": calls("list", f"use {SCRATCH}"),
    "torch.matmul(x, y)[0, 0]": calls("torch.matmul", DOT),
    "random.gauss(0, 1)": calls("random.gauss", "write language.random(seed, offset)"),
    "len(x.row(r))": calls("len on a row", "write x.shape[-1]"),
    "hasattr(x, 'size')": calls("hasattr", CONSTANT),
    "isinstance(x, float)": calls("isinstance on a tensor", CONSTANT),
    "math.log(x.row(r))": f"log takes numbers, got a row: {ROW}",
    "language.tanh(x.row(r))": f"tanh takes numbers, got a row: {ROW}",
    "(lambda v: torch.erf(v))(x[r, 0])": calls("torch.erf", "write math.erf(x)"),
    # Arithmetic and comparisons of rows and tensors.
    "(x.row(r) / 3)[0]": f"a row has no arithmetic: {ROW}",
    "(-x.row(r))[0]": f"a row has no arithmetic: {ROW}",
    "(x.row(r) ** 3)[0]": f"a row has no arithmetic: {ROW}",
    "x.row(r) @ y.row(r)": f"a row has no arithmetic: {DOT}",
    "(1.0 + x)[0, 0]": f"a tensor has no arithmetic: {FLAT}",
    "(x[0:2, 0:2] - 1.0)[0, 0]": f"a slice has no arithmetic: {SLICE}",
    "x.row(r) < y.row(r)": f"a row cannot be compared: {ROW}",
    "1.0 if x else 0.0": f"a tensor cannot be compared: {FLAT}",
    "x[r, 1:3][0]": f"slices have no arithmetic: compute with elements, {LOOP}: ... x[r, i] ..., "
    "or take x.row(r); for language.dot, a matrix of x with 2 dimensions takes one or two "
    "slices without steps, and an index for each other dimension",
    "x.row(r)[1:][0]": f"a row cannot be sliced, except for language.dot: {ROW}",
    # Attributes.
    "x.var()": "a tensor has no var: write a loop, for i in range(x.size): "
    "total = language.accumulate(total, ...)",
    "x.element_size()": "a tensor has no element_size: it has ndim, size, rows, shape, strides, "
    "flat, data and row(i)",
    "x.row(r).length": "a row has no length: it has elements, row[i], and its size is x.shape[-1]",
    "x.numel()": "a tensor has no numel: write x.size",
    "x.size(1)": "a number cannot be called: x.size, x.shape[d] and x.strides[d] are numbers",
    "x[r, 0].sqrt()": "Unknown attribute 'sqrt' of type float32: write math.sqrt(x)",
    "x.row(r, 1)[0]": "x.row takes one integer, got (int64, 1)",
    "x.shape": "x.shape or x.strides cannot be converted to float32: x.shape[d] and "
    "x.strides[d] are numbers",
    # Allocations.
    "[v for v in range(3)][0]": f"a kernel must not allocate: use {SCRATCH}",
    "{0: 1.0}[0]": f"a kernel must not allocate: use {SCRATCH}",
}
STATEMENTS = {
    "y[r, :] = 1.0": f"a slice cannot be written: write its elements, {LOOP}: x[r, i] = value",
    "y.row(r)[1:] = 0.0": f"a slice cannot be written: write its elements, {LOOP}: row[i] = value",
    "x[0:1, :] *= 2.0": f"a slice has no arithmetic: {SLICE}",
    "for v in x.row(r): y[r, 0] = v": f"a kernel cannot iterate over a row: {ROW}",
    "for i, v in enumerate(x.row(r)): y[r, i] = v": calls(
        "enumerate on a row", f"write a loop over indices, {LOOP}"
    ),
    "for v in reversed(x.row(r)): y[r, 0] = v": calls(
        "reversed", f"write a loop over indices, {LOOP}"
    ),
    "a, b = x.row(r)": "a row cannot be unpacked: take its elements, x[0], x[1]",
    "y.fill_(0.0)": "a tensor has no fill_: write a loop, for i in range(x.size): x[i] = value",
    "class A: pass": "a kernel cannot define a class",
    "global Z; Z = r": "a kernel cannot write to a global: write to an argument",
    "with torch.no_grad(): y[r, 0] = 1.0": "a kernel must not use with: put the with "
    "statement around the call of the operator",
}
ELEMENTS = {
    "torch.atan(x)": calls("torch.atan", "write math.atan(x)"),
    "np.sum(x)": calls(
        "np.sum",
        "an elementwise kernel sees one number; use a tile kernel (library.tile_kernel) for rows",
    ),
    "sum(x)": calls(
        "sum",
        "an elementwise kernel sees one number; use a tile kernel (library.tile_kernel) for rows",
    ),
    "x.sigmoid()": "Unknown attribute 'sigmoid' of type float32: write 1 / (1 + math.exp(-x))",
}


def message_of(source, kernel, folder):
    """Compile the function k of a source file; return the message and the file."""
    file = folder / "kernel.py"
    file.write_text(source)
    scope = dict(SCOPE)
    exec(compile(source, str(file), "exec"), scope)
    name = f"advised::f{next(serial)}"
    library.define(name, "(Tensor x) -> Tensor")
    if kernel is library.tile_kernel:
        library.register_fake(name, torch.empty_like)
    library.register_kernel(name, "cpu", kernel(scope["k"]))
    with pytest.raises((RuntimeError, TypeError)) as caught:
        getattr(torch.ops.advised, name.partition("::")[2])(torch.ones(3, 4))
    return str(caught.value), file


def expected(message, signature, file, line, source):
    """Return the whole message as a pattern for any operator name."""
    return rf"advised::f\d+: its kernel cannot be compiled for {signature}: " + re.escape(
        f"{message} ({file}:{line}: {source})"
    )


STATEMENTS |= {f"y[r, 0] = {expression}": message for expression, message in TILES.items()}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_tile_kernel(statement, tmp_path):
    source = f"def k(x, y, rows):\n    for r in rows:\n        {statement}\n"
    message, file = message_of(source, library.tile_kernel, tmp_path)
    wanted = expected(STATEMENTS[statement], "float32-2d,float32-2d", file, 3, statement)
    assert re.fullmatch(wanted, message), message


@pytest.mark.parametrize("expression", ELEMENTS)
def test_elementwise_kernel(expression, tmp_path):
    source = f"def k(x):\n    return {expression}\n"
    message, file = message_of(source, library.elementwise_kernel, tmp_path)
    wanted = expected(ELEMENTS[expression], "float32", file, 2, f"return {expression}")
    assert re.fullmatch(wanted, message), message


PLACES = {
    "a helper of the module": (
        "        y[r, 0] = helper(x.row(r))\n",
        (__file__, helper.__code__.co_firstlineno + 2, "return total + torch.logsumexp(row, 0)"),
    ),
    "a function inside": (
        "        def f(v):\n            return v + torch.exp(v)\n        y[r, 0] = f(x[r, 0])\n",
        (None, 4, "return v + torch.exp(v)"),
    ),
    "a call of several lines": (
        "        y[r, 0] = x[\n            r, 0\n        ] + torch.exp(\n            x[r, 0])\n",
        (None, 5, "] + torch.exp("),
    ),
    "an except": (
        "        try:\n            y[r, 0] = 1.0\n        except ValueError:\n            pass\n",
        (None, 5, "except ValueError:"),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_place(name, tmp_path):
    """The message names the line of the fault, in whichever function it is."""
    body, (where, line, text) = PLACES[name]
    source = f"def k(x, y, rows):\n    for r in rows:\n{body}"
    message, file = message_of(source, library.tile_kernel, tmp_path)
    assert message.endswith(f" ({where or file}:{line}: {text})"), message


def test_a_function_that_is_right_is_not_blamed(tmp_path):
    """The line calls functions that kernels support, and has a fault elsewhere."""
    source = "def k(x):\n    return math.exp(x) + float(max(x, 0.0)) + x.nothing\n"
    message, _ = message_of(source, library.elementwise_kernel, tmp_path)
    assert "Unknown attribute 'nothing' of type float32 (" in message
