"""Whether a weight is still the one that a copy was made of, seen in about two microseconds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SMALL = 2**10
"""Weights of so many numbers are compared as a whole."""
SAMPLES = 256
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Numbers(NamedTuple):
    """What a weight held.

    Attributes:
        sample: some of its numbers.
        total: the sum of all its bits, as integers.
    """

    sample: Tensor
    total: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Numbers:
        with torch.inference_mode(False), torch.no_grad():
            return cls(sample_of(weight).clone(), total_of(weight))

    def may_be_of(self, weight: Tensor) -> bool:
        """Whether the sample is a weight's, which may be on another device than before."""
        if weight.dtype != self.sample.dtype:
            return False
        return torch.equal(sample_of(weight), self.sample.to(weight.device))

    def to(self, device: torch.device) -> Numbers:
        return Numbers(*(it.to(device) for it in self))


def sample_of(weight: Tensor) -> Tensor:
    return weight.detach().as_strided(*sampled(weight))


def sampled(weight: Tensor) -> Any:
    """Return sizes, strides and offset of a sample from all over a matrix.

    It has a number of each row of up to `SAMPLES` rows, and ends with the last of the matrix, so
    that rows which are appended are seen, as for new tokens.
    """
    (rows, columns), (row, column) = weight.shape, weight.stride()
    if weight.numel() <= SMALL:
        return weight.shape, weight.stride(), weight.storage_offset()
    if weight.is_contiguous() or weight.t().is_contiguous():
        width = max(row, column)
        step = weight.numel() // SAMPLES
        # Without a common divisor, rows that follow each other are not seen in the same columns.
        while math.gcd(step, width) > 1:
            step -= 1
        count = (weight.numel() - 1) // step + 1
    else:
        count = min(SAMPLES, max(rows, columns))
        step = rows // count * row + columns // count * column
    last = weight.storage_offset() + (rows - 1) * row + (columns - 1) * column
    return (count,), (step,), last - (count - 1) * step


def reader(tensor: Tensor, sizes: Any, strides: Any, offset: Any) -> Callable[[], bytes]:
    """Make a function that reads part of a tensor of the CPU, and holds no reference to it.

    It takes a third of a microsecond, where a view and `torch.equal` take two.
    """
    item = tensor.element_size()
    length = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    start = tensor.untyped_storage().data_ptr() + offset * item
    memory: Any = (ctypes.c_char * (item * length if tensor.numel() else 0)).from_address(start)
    in_bytes = [item * it for it in strides]
    return np.ndarray(sizes, f"u{item}", memory, strides=in_bytes).tobytes


def total_of(weight: Tensor) -> Tensor:
    """Sum up the bits of a weight: integers of 64 bits as far as they go, and the rest."""
    flat = weight.detach().reshape(-1)
    per_integer = 8 // flat.element_size()
    if flat.storage_offset() % per_integer:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % per_integer
    rest = flat[whole:].view(INTEGERS[flat.element_size()])
    return flat[:whole].view(torch.int64).sum() + rest.sum()


def note_of(weight: Tensor) -> Tensor:
    version = -1 if weight.is_inference() else weight._version
    with torch.inference_mode(False):
        return torch.tensor((weight.untyped_storage()._cdata, weight.data_ptr(), version))


class Source:
    """A weight as it was when a copy of it was made.

    Autograd counts what is written to a tensor, and what is put in its place has other memory.
    Nothing counts what is written through ``.data``, as adapters are merged
    (``weight.data += delta``): a sample of the numbers shows it where most numbers change, and
    their total where any does.
    """

    def __init__(self, weight: Tensor, numbers: Numbers, is_current: bool = True) -> None:
        """Note a weight.

        Args:
            numbers: what it holds, or has held.
            is_current: whether there is a copy of these numbers.
        """
        storage = weight.untyped_storage()
        # As long as there is a reference to a storage, no other one has its address.
        self.storage = StorageWeakRef(storage)
        self.address: int = storage._cdata if is_current else 0
        self.place = weight.data_ptr()
        self.version = None if weight.is_inference() else weight._version
        self.layout = weight.shape, weight.stride(), weight.dtype
        self.sampled = sampled(weight)
        self.numbers = numbers
        sample = numbers.sample
        self.readers = weight.is_cpu and (
            reader(weight, *self.sampled),
            reader(sample, sample.shape, sample.stride(), sample.storage_offset()),
        )
        self.note = note_of(weight)
        """The same in a tensor, for compiled graphs."""
        if not is_current:
            self.note.zero_()

    @classmethod
    def of(cls, weight: Tensor) -> Source:
        return cls(weight, Numbers.of(weight))

    def holds(self, weight: Tensor) -> bool:
        """Whether a weight is the noted one, and shows no changes."""
        return (
            weight.untyped_storage()._cdata == self.address
            and weight.data_ptr() == self.place
            and (self.version is None or weight._version == self.version)
            and (weight.shape, weight.stride(), weight.dtype) == self.layout
            and self.holds_sample(weight)
        )

    def holds_sample(self, weight: Tensor) -> bool:
        if not self.readers:
            return torch.equal(weight.as_strided(*self.sampled), self.numbers.sample)
        now, noted = self.readers
        return now() == noted()

    def holds_all(self, weight: Tensor) -> bool:
        """Look at all numbers, too."""
        return self.holds(weight) and torch.equal(total_of(weight), self.numbers.total)
