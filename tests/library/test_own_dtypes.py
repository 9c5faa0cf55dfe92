"""An elementwise kernel reads masks and counts in their own dtype beside floats."""

import itertools
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from foo_ops import library, testing
from foo_ops.library.operators import FLOATING, SIGNED, UNSIGNED

pytestmark = pytest.mark.usefixtures("one_thread")

INTEGERS = SIGNED + UNSIGNED
serial = itertools.count()


def step_gradient(grad, mask, x, y, count):
    return False, grad if mask & True else 0.0, 0.0 if mask else grad, count & 0


def bend_second(grad_mask, grad_grad, grad, mask, x):
    return (2 * x if mask & True else 1.0) * grad_grad, 0.0, (2 * grad if mask else 0) * grad_grad


@pytest.fixture(scope="module", autouse=True)
def operators():
    lib = library.Library("foo_own", "FRAGMENT")

    @library.numba_op("foo_own::step", backward=step_gradient, lib=lib)
    def step(mask: bool, x: float, y: float, count: int) -> float:
        # Needs an integer: a float has no `&`, and a bool no second bit.
        return x + (count & 3) if mask else y

    @library.numba_op("foo_own::flip", lib=lib)
    def flip(n: int, mask: bool) -> tuple[int, bool]:
        return n ^ 1 if mask else n, mask and n > 3

    @library.numba_op("foo_own::parity", lib=lib)
    def parity(x: float, n: int) -> tuple[float, int, bool]:
        return x, n % 2, x < n

    @library.numba_op("foo_own::scaled", lib=lib)
    def scaled(z: complex, factor: float) -> complex:
        return z * factor if factor > 0 else z

    @library.elementwise_kernel(backward=bend_second)
    def bend_first(grad, mask, x):
        return False, (2 * x if mask & True else 1.0) * grad

    @library.numba_op("foo_own::bend", backward=bend_first, lib=lib)
    def bend(mask: bool, x: float) -> float:
        return x * x if mask else x

    return lib


def step_arguments(dtype, integer, device):
    mask = torch.tensor([True, False, True], device=device)
    x, y = torch.arange(6.0).view(2, 3), torch.full((2, 1), -1.0)
    count = torch.tensor([[1], [7]], device=device)
    return mask, x.to(device, dtype), y.to(device, dtype), count.to(integer)


@pytest.mark.parametrize("integer", INTEGERS, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_masks_and_integers_beside_floats(dtype, integer, device):
    arguments = step_arguments(dtype, integer, device)
    result = torch.ops.foo_own.step(*arguments)
    assert result.dtype == dtype
    assert result.tolist() == [[1, -1, 3], [6, -1, 8]]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_masks_beside_integers(dtype, device):
    n = torch.arange(6, device=device).to(dtype)
    numbers, flags = torch.ops.foo_own.flip(n, torch.tensor([True] * 5 + [False], device=device))
    assert (numbers.dtype, flags.dtype) == (dtype, torch.bool)
    assert numbers.tolist() == [1, 0, 3, 2, 5, 5]
    assert flags.tolist() == [False] * 4 + [True, False]


def test_results_of_other_kinds(device):
    """An int64 and a bool result, beyond float32's precision, beside one in the common dtype."""
    n = torch.tensor([2**40 + 1, 2**40 + 2], device=device)
    x = torch.tensor([0.5, 2.0**60], device=device, dtype=torch.bfloat16)
    same, odd, is_less = torch.ops.foo_own.parity(x, n)
    assert (same.dtype, odd.dtype, is_less.dtype) == (torch.bfloat16, torch.int64, torch.bool)
    assert torch.equal(same, x)
    assert (odd.tolist(), is_less.tolist()) == ([1, 0], [True, False])


def test_common_dtype_is_that_of_the_widest_kind(device):
    """Counts in int64 do not widen it, nor does float64 beside complex numbers."""
    mask, x, y, count = step_arguments(torch.float16, torch.int64, device)
    assert torch.ops.foo_own.step(mask, x, y, count).dtype == torch.float16
    assert torch.ops.foo_own.step(mask, x, y.double(), count).dtype == torch.float64
    z = torch.tensor([1 + 2j, 3j], device=device)
    factor = torch.tensor([2.0, -1.0], dtype=torch.float64, device=device)
    result = torch.ops.foo_own.scaled(z, factor)
    assert result.dtype == torch.complex64
    assert result.tolist() == [2 + 4j, 3j]


@pytest.mark.parametrize("layout", testing.LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts(layout, device):
    tensors = [
        torch.rand(4, 35) < 0.5,
        torch.randn(4, 35),
        torch.randn(4, 35),
        torch.randint(-9, 9, (4, 35), dtype=torch.int16),
    ]
    mask, x, y, count = [testing.copy_with_layout(layout(tensor), device) for tensor in tensors]
    expected = torch.where(mask, x + (count & 3), y)
    assert torch.equal(torch.ops.foo_own.step(mask, x, y, count), expected)
    out = torch.empty_like(expected)
    assert torch.equal(torch.ops.foo_own.step(mask, x, y, count, out=out), expected)


def test_in_place(device):
    n = torch.arange(4, device=device)
    mask = torch.tensor([True, True, False, False], device=device)

    @library.numba_op(f"foo_own::flip{next(serial)}")
    def flipped(n: int, mask: bool) -> int:
        return n ^ 1 if mask else n

    in_place = getattr(torch.ops.foo_own, flipped.__name__ + "_")
    assert in_place(n, mask) is n
    assert n.tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize("is_fake", [False, True])
def test_other_dtypes_are_refused(is_fake, device):
    mask, x, y, count = step_arguments(torch.float32, torch.int64, device)
    wrong = {
        "mask must have bool, got float32": (x, x, y, count),
        "count must have an integer dtype, got float32": (mask, x, y, x),
        "count must have an integer dtype, got bool": (mask, x, y, mask),
        "x and y must have a floating-point dtype, got int64": (mask, count, count, count),
    }
    mode = FakeTensorMode()
    for message, arguments in wrong.items():
        if is_fake:
            arguments = [mode.from_tensor(argument) for argument in arguments]
        with pytest.raises(TypeError, match=rf"\Astep: {re.escape(message)}\Z"):
            torch.ops.foo_own.step(*arguments)


def test_opcheck(device):
    mask, x, y, count = step_arguments(torch.float32, torch.int32, device)
    x.requires_grad_()
    y.requires_grad_()
    results = library.opcheck(torch.ops.foo_own.step, (mask, x, y, count))
    assert results == dict.fromkeys(results, "SUCCESS")


def test_gradients(device):
    mask, x, y, count = step_arguments(torch.float64, torch.int64, device)
    x.requires_grad_()
    y.requires_grad_()
    assert torch.autograd.gradcheck(torch.ops.foo_own.step, (mask, x, y, count))
    assert torch.autograd.gradcheck(torch.ops.foo_own.bend, (mask, x))
    assert torch.autograd.gradgradcheck(torch.ops.foo_own.bend, (mask, x))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(device):
    backend = "inductor" if device == "cpu" else "aot_eager"
    graph = torch.compile(torch.ops.foo_own.step, backend=backend, fullgraph=True, dynamic=True)
    for integer in (torch.int32, torch.int64):
        arguments = step_arguments(torch.float32, integer, device)
        assert torch.equal(graph(*arguments), torch.ops.foo_own.step(*arguments))


def test_optional_mask(device):
    """elementwise_kernel lists these tensors by name."""
    name = f"foo_own::optional{next(serial)}"
    library.define(name, "(Tensor input, Tensor? mask=None) -> Tensor")

    @library.register_kernel(name, ("cpu", "foo"))
    @library.elementwise_kernel(own_dtypes={"mask": (torch.bool, torch.uint8)})
    def kernel(x, mask):
        if mask is None:
            return -x
        return x if mask == 1 else 0.0

    call = getattr(torch.ops.foo_own, name.partition("::")[2])
    input = torch.ones(3, device=device)
    mask = torch.tensor([0, 1, 1], device=device)
    assert call(input).tolist() == [-1] * 3
    assert call(input, mask.bool()).tolist() == [0, 1, 1]
    assert call(input, mask.to(torch.uint8)).tolist() == [0, 1, 1]
    with pytest.raises(TypeError, match=r"mask must have bool or uint8, got int64\Z"):
        call(input, mask)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"mask": (torch.bool,), "other": (torch.bool,)},
            r"own_dtypes must name tensors that are read \(input, mask\), got other",
        ),
        (
            {"input": (torch.float32,), "mask": (torch.bool,)},
            "an elementwise kernel must take a tensor that is neither optional nor in own_dtypes",
        ),
    ],
    ids=["unknown", "all"],
)
def test_wrong_names(own, message):
    name = f"foo_own::wrong{next(serial)}"
    library.define(name, "(Tensor input, Tensor mask) -> Tensor")
    kernel = library.elementwise_kernel(lambda x, mask: x, own_dtypes=own)
    with pytest.raises(TypeError, match=rf"\A{name}: {message}\Z"):
        library.register_kernel(name, "cpu", kernel)
