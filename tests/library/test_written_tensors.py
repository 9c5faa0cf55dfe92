"""Tensors are checked before they are written: shapes, dtypes, devices, overlaps, all overloads."""

import itertools
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from foo_ops import language, library

DEVICES = ("cpu", "foo")

ARGUMENTS = "Tensor input, Tensor weight"

serial = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def lib():
    lib = library.Library("foo_written", "FRAGMENT")
    library.numba_op("foo_written::add", add, lib=lib)
    library.numba_op("foo_written::add_and_more", add_and_more, lib=lib)
    for name, schema in {
        "scale": f"({ARGUMENTS}) -> Tensor",
        "scale_": "(Tensor(a!) input, Tensor weight) -> Tensor(a!)",
        "scale.out": f"({ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)",
        "own_": "(Tensor(a!) input, Tensor weight) -> Tensor(a!)",
        "alone_": "(Tensor(a!) input, Tensor weight) -> Tensor(a!)",
        "twice": f"({ARGUMENTS}) -> (Tensor, Tensor)",
        "twice.out": f"({ARGUMENTS}, *, Tensor(a!) first, Tensor(b!) second) "
        "-> (Tensor(a!), Tensor(b!))",
        "both_": "(Tensor(a!) input, Tensor(b!) weight) -> ()",
    }.items():
        lib.define(name + schema)
        kernel = {"twice": twice_rows, "twice.out": twice_rows, "both_": both}.get(name, scale_rows)
        library.register_kernel(f"foo_written::{name}", DEVICES, kernel, lib=lib)
    library.register_fake("foo_written::scale", scale_fake, lib=lib)
    library.register_fake("foo_written::own_", own_fake, lib=lib)
    library.register_fake("foo_written::twice", twice_fake, lib=lib)
    library.register_fake("foo_written::both_", lambda input, weight: None, lib=lib)
    return lib


def add(x: float, y: float) -> float:
    return x + y


def add_and_more(x: float, y: float) -> tuple[float, float]:
    return x + y, x + 2 * y


@library.tile_kernel
def scale_rows(input, weight, output, rows):
    for row in rows:
        x, y = input.row(row), output.row(row)
        for i in range(input.shape[-1]):
            y[i] = x[i] * weight[i]


@library.tile_kernel
def twice_rows(input, weight, first, second, rows):
    for row in rows:
        x, y, z = input.row(row), first.row(row), second.row(row)
        for i in range(input.shape[-1]):
            y[i] = x[i] * weight[i]
            z[i] = 2 * x[i] * weight[i]


@library.tile_kernel
def both(input, weight, rows):
    for row in rows:
        for i in range(input.shape[-1]):
            input.row(row)[i] += 1
            weight.row(row)[i] += language.cast(2, weight)


def scale_fake(input, weight):
    if weight.shape != input.shape[-1:]:
        raise ValueError(f"scale: weight must have shape {list(input.shape[-1:])}")
    dtype = torch.promote_types(input.dtype, weight.dtype)
    return torch.empty_like(input, dtype=dtype, memory_format=torch.contiguous_format)


def own_fake(input, weight):
    if weight.shape != input.shape[-1:]:
        raise ValueError(f"own_: weight must have shape {list(input.shape[-1:])}")
    return input


def twice_fake(input, weight):
    result = scale_fake(input, weight)
    return result, torch.empty_like(result)


ops = torch.ops.foo_written


def refused(error, message, call, *tensors, memory=()):
    """Call twice, since fake results are cached; nothing may be written or resized."""
    watched = (*tensors, *memory)
    before = [(x.clone(), x.shape, x.stride()) for x in watched]
    for _ in range(2):
        with pytest.raises(error, match=rf"\A{re.escape(message)}") as caught:
            call(*tensors)
        assert type(caught.value) is error
        for tensor, (values, *layout) in zip(watched, before):
            assert [tensor.shape, tensor.stride()] == layout
            assert torch.equal(tensor, values)
    if "memory" in message:
        refused_of_fakes(error, message, call, *tensors)


def refused_of_fakes(error, message, call, *tensors):
    """Fake tensors of one storage show which arguments share memory."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        with pytest.raises(error, match=rf"\A{re.escape(message)}"):
            call(*fakes)
    assert [x.shape for x in fakes] == [x.shape for x in tensors]


def out_of(operator):
    return lambda *tensors: operator.out(*tensors[:2], out=tensors[2])


def pair_of(operator):
    names = [a.name for a in operator.out._schema.arguments if a.kwarg_only]
    return lambda x, y, *outs: operator.out(x, y, **dict(zip(names, outs)))


def test_rotary_embedding_in_place(device):
    """Unchecked, it wrote rows beside its own."""
    memory = torch.arange(24.0, device=device).view(4, 6)
    tables = torch.zeros(1, 6, device=device), torch.ones(1, 6, device=device)
    refused(
        ValueError,
        "rotary_embedding_: cosine must have a last dimension of at most 3, half of input's, got 6",
        torch.ops.foo.rotary_embedding_,
        *(memory[:1], *tables),
        memory=[memory],
    )


@pytest.mark.parametrize(("name", "says"), [("own_", "own_"), ("scale_", "scale")])
def test_in_place_asks_its_own_fake_kernel_or_the_functional_operators(name, says, device):
    memory = torch.ones(4, 6, device=device)
    operator = getattr(ops, name)
    weight = torch.arange(5.0, device=device)
    message = f"{says}: weight must have shape [6]"
    refused(ValueError, message, operator, memory[1:2], weight, memory=[memory])
    weight = torch.arange(6.0, device=device)
    assert operator(memory[1:2], weight).tolist() == [weight.tolist()]
    assert memory.sum().item() == 18 + 15


def test_in_place_takes_what_the_functional_operator_returns(lib, device):
    name = f"outer{next(serial)}"
    lib.define(f"{name}({ARGUMENTS}) -> Tensor")
    lib.define(f"{name}_(Tensor(a!) input, Tensor weight) -> Tensor(a!)")
    library.register_fake(
        f"foo_written::{name}",
        lambda input, weight: weight.new_empty((3, *input.shape)),
        lib=lib,
    )
    library.register_kernel(f"foo_written::{name}_", device, scale_rows, lib=lib)
    input = torch.ones(2, device=device)
    message = f"{name}_: input must have shape [3, 2] as the result has, got [2]"
    refused(ValueError, message, getattr(ops, name + "_"), input, input.clone())
    input = torch.ones(3, 2, 2, device=device, dtype=torch.int64)[0]
    library.register_fake(
        f"foo_written::{name}",
        lambda input, weight: weight.new_empty(input.shape),
        lib=lib,
        allow_override=True,
    )
    message = f"{name}_: input must have a dtype that float64 can be cast to, got int64"
    weight = torch.ones(2, device=device, dtype=torch.float64)
    refused(TypeError, message, getattr(ops, name + "_"), input, weight)


def test_in_place_without_any_fake_kernel(device):
    message = (
        "foo_written::alone_: a tile kernel needs a fake kernel, which says how its results are "
        "allocated: register one with foo_ops.library.register_fake"
    )
    refused(RuntimeError, message, ops.alone_, *torch.ones(2, 3, device=device))


def test_out_of_a_tile_kernel(device):
    input, weight = torch.randn(4, 3, device=device), torch.randn(3, device=device)
    expected, memory = input * weight, torch.zeros(5, 6, device=device)
    call = out_of(ops.scale)
    # Unchecked, it resized a part of larger memory, and wrote behind it.
    message = (
        "scale: out must have shape [4, 3] as the result has, since it shares memory and cannot be "
        "resized, got "
    )
    for out in (memory[0], memory[1, :0], memory[:2, :3]):
        refused(ValueError, f"{message}{list(out.shape)}", call, input, weight, out)
    refused(ValueError, message + "[3]", call, input, weight, weight)
    refused(ValueError, message + "[12]", call, input, weight, input.view(12))
    weight = torch.randn(4, device=device)
    refused(ValueError, "scale: weight must have shape [3]", call, input, weight, memory[:4, :3])
    assert memory.count_nonzero() == 0
    weight = torch.randn(3, device=device)
    expected = input * weight
    assert torch.equal(call(input, weight, torch.zeros(7, device=device)), expected)
    emptied = torch.zeros(100, device=device).resize_(0)
    for out in (torch.empty(0, device=device), emptied, memory[:4, ::2]):
        assert call(input, weight, out) is out
        assert torch.equal(out, expected)


def test_outs_of_a_tile_kernel_that_share_memory(device):
    x, y = torch.randn(4, 3, device=device), torch.randn(3, device=device)
    memory = torch.zeros(4, 8, device=device)
    check_outs_that_share_memory(pair_of(ops.twice), "twice", "second", "first", memory, x, y)
    assert torch.equal(memory[:, :5:2], x * y)
    assert torch.equal(memory[:, 1:6:2], 2 * x * y)


def check_outs_that_share_memory(call, name, second, first, memory, x, y):
    message = f"{name}: {second} must not share memory with {first}, since both are written"
    for outs in (
        (memory[:, :3], memory[:, :3]),
        (memory[:, :3], memory[:, 2:5]),
        (memory[:, :5:2], memory[:, 2:7:2]),
        (memory[:, :3], memory.view(-1)[12:24].view(4, 3)),
    ):
        refused(RuntimeError, message, call, x, y, *outs, memory=[memory])
    memory.copy_(torch.zeros_like(memory))
    call(x, y, memory[:, :5:2], memory[:, 1:6:2])


def test_arguments_in_place_that_share_memory(device):
    memory = torch.zeros(4, 6, device=device)
    message = "both_: weight must not share memory with input, since both are written"
    refused(RuntimeError, message, ops.both_, memory[:, :3], memory[:, 2:5], memory=[memory])
    ops.both_(memory[:, ::2], memory[:, 1::2])
    assert memory.tolist() == [[1, 2] * 3] * 4


def test_elements_that_share_memory(device):
    """Elements may share memory without an expanded dimension, too."""
    memory, y = torch.ones(9, device=device), torch.ones(3, device=device)
    windows = memory.as_strided((3, 3), (2, 1))
    message = "scale_: input is written, so it must not have elements that share memory"
    refused(RuntimeError, message, ops.scale_, windows, y, memory=[memory])
    message = "unsupported operation: more than one element of the written-to tensor refers to a"
    refused(RuntimeError, message, ops.add_, windows, y, memory=[memory])
    apart = memory.as_strided((2, 3), (3, 2))
    ops.add_(apart, y)
    assert memory.tolist() == [2, 1, 2, 2, 2, 2, 1, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_elementwise_in_place_is_never_resized(dtype, device):
    """Unchecked, float16 beside float32 was resized, and its neighbours were overwritten."""
    memory = torch.zeros(20, dtype=dtype, device=device)
    y = torch.ones(2, 3, device=device)
    message = "output with shape [3] doesn't match the broadcast shape [2, 3]"
    refused(RuntimeError, message, ops.add_, memory[:3], y, memory=[memory])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = mode.from_tensor(memory[:3]), mode.from_tensor(y)
        with pytest.raises(RuntimeError, match=rf"\A{re.escape(message)}\Z"):
            ops.add_(*fakes)
        assert fakes[0].shape == (3,)


def test_in_place_of_a_dtype_that_is_not_computed_is_not_resized(lib):
    """The operator's results are float32, although it computes in float64."""
    lib.define("narrow_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
    kernel = library.elementwise_kernel(
        lambda x, y: x + y, dtypes=(torch.float64,), result_type=torch.float32
    )
    library.register_kernel("foo_written::narrow_", DEVICES, kernel, lib=lib)
    memory, y = torch.zeros(9), torch.ones(2, 3, dtype=torch.float64)
    message = "output with shape [3] doesn't match the broadcast shape [2, 3]"
    refused(RuntimeError, message, ops.narrow_, memory[:3], y, memory=[memory])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elementwise_out_of_another_shape(dtype, device):
    x, y = torch.randn(3, device=device), torch.randn(2, 3, device=device)
    call, memory = out_of(ops.add), torch.zeros(20, dtype=dtype, device=device)
    # Unchecked, it was resized, and then read as an input.
    message = "output with shape [3] doesn't match the broadcast shape [2, 3]"
    refused(RuntimeError, message, call, x, y, x)
    message = (
        "add: out must have shape [2, 3] as the result has, since it shares memory and cannot be "
        "resized, got "
    )
    refused(ValueError, message + "[3]", call, x[:], y, x)
    refused(ValueError, message + "[5]", call, x, y, memory[:5], memory=[memory])
    refused(ValueError, message + "[0]", call, x, y, memory[5:5], memory=[memory])
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (x, y, memory)]
        with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\[5\]\Z"):
            call(fakes[0], fakes[1], fakes[2][:5])
        assert call(*fakes).shape == (2, 3)
    assert torch.equal(call(x, y, memory), (x + y).to(dtype))
    assert torch.equal(call(x, y, memory.resize_(0)), (x + y).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elementwise_outs_that_share_memory(dtype, device):
    x, y = torch.randn(4, 3, device=device), torch.randn(3, device=device)
    memory = torch.zeros(4, 8, dtype=dtype, device=device)
    call = pair_of(ops.add_and_more)
    check_outs_that_share_memory(call, "add_and_more", "out1", "out0", memory, x, y)
    assert torch.equal(memory[:, :5:2], (x + y).to(dtype))


def test_elementwise_input_that_overlaps_the_output(device):
    """TensorIterator does not compare slices with a step."""
    memory = torch.arange(10.0, device=device)
    message = "unsupported operation: some elements of the input tensor and the written-to tensor"
    refused(RuntimeError, message, ops.add_, memory[2::2], memory[:8:2], memory=[memory])
    ops.add_(memory[::2], memory[1::2])
    assert memory.tolist() == [1, 1, 5, 3, 9, 5, 13, 7, 17, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elementwise_out_on_another_device(dtype):
    """Unchecked, it was filled if its dtype differed from the result's."""
    x = torch.ones(3, device="foo")
    for own, out in ((x, torch.zeros(3, dtype=dtype)), (x.cpu(), torch.zeros(3, device="foo"))):
        check_devices(out_of(ops.add), own, own, out.to(dtype))
    check_devices(ops.add_, torch.ones(3, dtype=dtype), x)
    check_devices(ops.add_, x.to(dtype), torch.ones(3))
    check_devices(ops.add, x, torch.ones(1, dtype=dtype))
    check_devices(ops.add, x, torch.ones(3, device="foo:1"))
    check_devices(ops.add_, torch.tensor(1, dtype=dtype), torch.tensor(1.0, device="foo"))


def check_devices(call, *tensors):
    others = {tensor.device for tensor in tensors} - {torch.device("foo:0")}
    message = (
        "Expected all tensors to be on the same device, but found at least two devices, foo:0 and "
        f"{others.pop()}!"
    )
    refused(RuntimeError, message, call, *tensors)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=message):
        call(*map(mode.from_tensor, tensors))


def test_numbers_on_cpu_beside_foo():
    """One tensor without dimensions may be on the CPU, as on CUDA."""
    x, one = torch.ones(3, device="foo"), torch.tensor(1.0)
    assert ops.add(one, x).tolist() == ops.add_(x.clone(), one).tolist() == [2, 2, 2]
    out = torch.empty(3, dtype=torch.float64, device="foo")
    assert out_of(ops.add)(one, x, out).tolist() == [2, 2, 2]
    message = "Trying to pass too many CPU scalars to non-CPU kernel!"
    refused(RuntimeError, message, out_of(ops.add), one, one, out)
    message = "scale: weight must be on foo:0 as input is, got cpu"
    refused(ValueError, message, ops.scale, x, one)


def test_a_kernel_that_cannot_be_compiled_resizes_nothing(lib, device):
    for arguments, kernel in (
        ("Tensor x, Tensor y", library.elementwise_kernel(lambda x, y: x.middle)),
        (ARGUMENTS, library.tile_kernel(lambda input, weight, output, rows: input.middle)),
    ):
        name = f"wrong{next(serial)}"
        lib.define(f"{name}({arguments}) -> Tensor")
        lib.define(f"{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")
        if "input" in arguments:
            library.register_fake(f"foo_written::{name}", scale_fake, lib=lib)
        library.register_kernel(f"foo_written::{name}.out", device, kernel, lib=lib)
        out = torch.empty(0, device=device)
        x = torch.ones(3, device=device)
        refused(RuntimeError, "", out_of(getattr(ops, name)), x, x.clone(), out)
