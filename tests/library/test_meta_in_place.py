"""On meta tensors, an in-place operator uses the fake kernel of the functional one."""

import itertools
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from foo_ops import library

SCHEMAS = {
    "": "(Tensor input, Tensor? by=None) -> Tensor",
    "_": "(Tensor(a!) target, Tensor? factor=None) -> Tensor(a!)",
}
serial = itertools.count()


@pytest.fixture
def lib():
    library_ = library.Library("foo_in_place", "FRAGMENT")
    yield library_
    library_._destroy()


@library.tile_kernel
def scale_rows(input, by, output, rows):
    for row in rows:
        for i in range(input.shape[-1]):
            if by is None:
                output[row, i] = input[row, i]
            else:
                output[row, i] = input[row, i] * by[i]


def scale_fake(input, by=None):
    if by is None:
        return torch.empty_like(input)
    return torch.empty(*input.shape[:-1], *by.shape, dtype=by.dtype, device=by.device)


def refused(error, message, call, *tensors):
    with pytest.raises(error, match=rf"\A{re.escape(message)}\Z"):
        call(*tensors)


@pytest.mark.parametrize("mode", [None, FakeTensorMode()], ids=["meta", "fake"])
@pytest.mark.parametrize("variants", [("", "_"), ("_", "")], ids=["f first", "f_ first"])
def test_in_place(mode, variants, lib):
    name = f"scale{next(serial)}"
    for variant in variants:
        qualified = f"foo_in_place::{name}{variant}"
        tags = torch.Tag.inplace if variant else ()
        lib.define(name + variant + SCHEMAS[variant], tags=tags)
        library.register_kernel(qualified, ("cpu", "foo"), scale_rows, lib=lib)
    library.register_fake(f"foo_in_place::{name}", scale_fake, lib=lib)
    in_place = getattr(torch.ops.foo_in_place, f"{name}_")
    target, factor = torch.ones(2, 3, device="meta"), torch.ones(3, device="meta")
    narrow, whole = torch.ones(2, device="meta"), torch.ones(2, 3, device="meta").int()
    if mode is not None:
        target, factor, narrow, whole = map(mode.from_tensor, (target, factor, narrow, whole))
    assert in_place(target) is target
    assert in_place(target, factor) is target
    assert in_place(target, factor=factor) is target
    message = f"{name}_: target must have shape [2, 2] as the result has, got [2, 3]"
    refused(ValueError, message, in_place, target, narrow)
    message = f"{name}_: target must have a dtype that float32 can be cast to, got int32"
    refused(TypeError, message, in_place, whole, factor)


def test_its_own_fake_kernel_stays(lib, device):
    """Also if it is registered later; without any fake kernel the call is refused."""
    for name in ("before", "later", "never"):
        for variant, schema in SCHEMAS.items():
            lib.define(name + variant + schema)
        if name == "before":
            library.register_fake(f"foo_in_place::{name}_", lambda target, factor: factor, lib=lib)
        library.register_kernel(f"foo_in_place::{name}_", ("cpu", "foo"), scale_rows, lib=lib)
        in_place = getattr(torch.ops.foo_in_place, f"{name}_")
        tensors = torch.empty(2, 3, device="meta"), torch.empty(3, device="meta")
        if name != "before":
            message = (
                f"foo_in_place::{name}_: a tile kernel needs a fake kernel, which says how its "
                "results are allocated: register one with foo_ops.library.register_fake"
            )
            refused(RuntimeError, message, in_place, *tensors)
            on_device = torch.ones(2, 3, device=device), torch.ones(3, device=device)
            refused(RuntimeError, message, in_place, *on_device)
        if name == "later":
            library.register_fake(f"foo_in_place::{name}_", lambda target, factor: factor, lib=lib)
        if name != "never":
            assert in_place(*tensors).shape == (3,)


def test_compiled(lib):
    for variant, schema in SCHEMAS.items():
        lib.define("compiled" + variant + schema, tags=torch.Tag.inplace if variant else ())
        library.register_kernel(f"foo_in_place::compiled{variant}", "cpu", scale_rows, lib=lib)
    library.register_fake("foo_in_place::compiled", scale_fake, lib=lib)

    def twice(x, by):
        return torch.ops.foo_in_place.compiled_(x.clone(), by) + 1

    x, by = torch.ones(2, 3), torch.arange(3.0)
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    assert compiled(x, by).tolist() == [[1, 2, 3]] * 2
