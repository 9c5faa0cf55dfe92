"""Arguments that are constants in a kernel: strings of a typing.Literal, and dtypes."""

import itertools
import math
import re
import typing

import pytest
import torch

from foo_ops import library
from foo_ops.kernels.compiler.resolve import _addresses

Approximate = typing.Literal["none", "tanh"]


def gelu_gradient(grad, x, approximate):
    if approximate == "none":
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return grad * ((1 + math.erf(x / math.sqrt(2))) / 2 + x * density)
    inner = math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return grad * ((1 + inner) / 2 + x * (1 - inner * inner) * slope / 2)


@library.numba_op("foo_texts::gelu", backward=gelu_gradient)
def gelu(x: float, approximate: Approximate = "none") -> float:
    if approximate == "tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


library.define(
    "foo_texts::pad",
    '(Tensor x, str mode="zeros", str? side=None, ScalarType? dtype=None) -> Tensor',
)


@library.register_fake("foo_texts::pad")
def pad_fake(x, mode="zeros", side=None, dtype=None):
    return x.new_empty(x.shape[0], x.shape[1] + 1, dtype=dtype or x.dtype)


def value_of(mode, x, row):
    """Use the string in a function that the kernel calls."""
    if mode == "zeros":
        return 0.0
    if mode in ("first", "last"):
        return x[row, 0 if mode == "first" else -1]
    return 1.0


@library.register_kernel("foo_texts::pad", ("cpu", "foo"))
@library.tile_kernel
def pad(
    x,
    mode: typing.Literal["zeros", "ones", "first", "last"],
    side: 'typing.Literal["left", "right"] | None',
    dtype,
    output,
    rows,
):
    is_left = side is not None and side != "right"
    offset = 1 if is_left else 0
    for row in rows:
        for i in range(x.shape[1]):
            output[row, i + offset] = x[row, i]
        last = 0 if is_left else x.shape[1]
        output[row, last] = value_of(mode, x, row)
        if dtype == "float64":
            output[row, last] += 0.5


def padded(x, mode="zeros", side=None, dtype=None):
    x = x.to(dtype or x.dtype)
    values = {
        "zeros": torch.zeros_like(x[:, :1]),
        "ones": torch.ones_like(x[:, :1]),
        "first": x[:, :1],
        "last": x[:, -1:],
    }
    value = values[mode] + (0.5 if dtype == torch.float64 else 0)
    return torch.cat([value, x] if side == "left" else [x, value], 1)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_elementwise_kernel(approximate, device):
    x = torch.randn(3, 50, dtype=torch.float64, device=device)
    expected = torch.nn.functional.gelu(x.cpu(), approximate=approximate)
    torch.testing.assert_close(gelu(x, approximate=approximate).cpu(), expected)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gelu(x, approximate=approximate), x)
    value, tangent = torch.func.jvp(
        lambda x: gelu(x, approximate=approximate), (x.detach(),), (torch.ones_like(x),)
    )
    torch.testing.assert_close(
        tangent, torch.autograd.grad(gelu(x, approximate=approximate).sum(), x)[0]
    )
    mapped = torch.vmap(lambda row: gelu(row, approximate=approximate))(x.detach())
    torch.testing.assert_close(mapped, value)
    target = x.detach().clone()
    assert torch.equal(torch.ops.foo_texts.gelu_(target, approximate=approximate), value)
    out = gelu(x.detach(), approximate=approximate, out=torch.empty_like(value))
    assert torch.equal(out, value)


def test_schemas():
    assert str(gelu.default._schema) == (
        'foo_texts::gelu(Tensor x, *, str approximate="none") -> Tensor'
    )
    assert str(torch.ops.foo_texts.gelu_backward.default._schema) == (
        "foo_texts::gelu_backward(Tensor grad0, Tensor x, str approximate) -> Tensor"
    )


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("mode", ["zeros", "ones", "first", "last"])
def test_tile_kernel(mode, side, dtype, device):
    x = torch.randn(3, 4)
    result = torch.ops.foo_texts.pad(x.to(device), mode, side, dtype)
    expected = padded(x, mode, side, dtype)
    assert torch.equal(result.cpu(), expected)
    assert result.dtype == expected.dtype
    mapped = torch.vmap(lambda x: torch.ops.foo_texts.pad(x, mode, side, dtype))
    assert torch.equal(mapped(torch.stack([x, x]).to(device))[1].cpu(), expected)


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
def test_opcheck(dtype, device):
    x = torch.randn(3, 4, device=device)
    for call, args, keywords in (
        (torch.ops.foo_texts.pad.default, (x, "last", "left", dtype), {}),
        (gelu.default, (x.clone().requires_grad_(),), {"approximate": "tanh"}),
    ):
        assert set(library.opcheck(call, args, keywords).values()) == {"SUCCESS"}


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(device):
    def function(x, mode, approximate):
        return gelu(torch.ops.foo_texts.pad(x * 2, mode), approximate=approximate)

    backend = "inductor" if device == "cpu" else "aot_eager"
    graph = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.randn(3, 4, device=device)
    for mode, approximate in (("last", "none"), ("ones", "tanh")):
        torch.testing.assert_close(graph(x, mode, approximate), function(x, mode, approximate))


def test_each_text_is_a_variant():
    """A string compiles its variant at first use, and only once."""

    @library.numba_op("foo_texts::variants")
    def variants(x: float, mode: typing.Literal["none", "b c"] = "none") -> float:
        return x if mode == "none" else -x

    def signatures():
        return {it for name, it in _addresses if name == "foo_texts::variants"}

    x = torch.ones(2)
    assert signatures() == set()
    variants(x)
    assert signatures() == {"float32,'none'"}
    variants(x, mode="b c")
    variants(x, mode="none")
    assert signatures() == {"float32,'none'", "float32,'b c'"}


@pytest.mark.parametrize("place", ["cpu", "foo", "meta"])
def test_another_text(place):
    x = torch.ones(2, 3, device=place)
    for call, message in (
        (
            lambda: gelu(x, approximate="Tanh"),
            "gelu: approximate must be 'none' or 'tanh', got 'Tanh'",
        ),
        (
            lambda: torch.ops.foo_texts.gelu_(x, approximate=""),
            "gelu_: approximate must be 'none' or 'tanh', got ''",
        ),
        (
            lambda: torch.ops.foo_texts.pad(x, "same"),
            "pad: mode must be 'zeros', 'ones', 'first' or 'last', got 'same'",
        ),
        (
            lambda: torch.ops.foo_texts.pad(x, side="up"),
            "pad: side must be 'left' or 'right', got 'up'",
        ),
    ):
        with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z"):
            call()


serial = itertools.count()


def register(kernel, schema):
    name = f"foo_texts::f{next(serial)}"
    library.define(name, schema)
    library.register_fake(name, lambda x, *more: x.new_empty(x.shape))
    library.register_kernel(name, ("cpu", "foo"), kernel)
    return name


def no_choices(x, mode):
    return x


def choices_of_numbers(x, mode: typing.Literal[1, 2]):
    return x


def tile_without_choices(x, how, y, rows):
    pass


@pytest.mark.parametrize(
    ("make", "function", "name"),
    [
        (library.elementwise_kernel, no_choices, "mode"),
        (library.elementwise_kernel, choices_of_numbers, "mode"),
        (library.tile_kernel, tile_without_choices, "how"),
    ],
)
def test_kernel_that_does_not_say_its_choices(make, function, name):
    code = function.__code__
    message = (
        r"foo_texts::f\d+: mode is str, so the kernel must list its choices: annotate "
        rf"{name} in {function.__name__} \({re.escape(code.co_filename)}:{code.co_firstlineno}\) "
        r'with typing.Literal\["a", "b"\]'
    )
    with pytest.raises(TypeError, match=rf"\A{message}\Z"):
        register(make(function), "(Tensor x, str mode) -> Tensor")


def test_choice_that_cannot_be_one():
    def f(x, mode: typing.Literal["a", "b,c"]):
        return x

    message = "a choice must have no comma, quote or backslash, got 'b,c'"
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        register(library.elementwise_kernel(f), "(Tensor x, str mode) -> Tensor")


def test_default_that_is_no_choice():
    message = (
        r"foo_texts::wrong: wrong \(.*\) must give mode one of its choices as default, got 'c'"
    )
    with pytest.raises(TypeError, match=rf"\A{message}\Z"):

        @library.numba_op("foo_texts::wrong")
        def wrong(x: float, mode: typing.Literal["a", "b"] = "c") -> float:
            return x


def test_optional_text_of_numba_op(device):
    @library.numba_op("foo_texts::rounded")
    def rounded(x: float, how: typing.Literal["down", "up"] | None = None) -> float:
        if how is None:
            return x
        return math.floor(x) if how == "down" else math.ceil(x)

    x = torch.tensor([1.5, -0.5], device=device)
    assert rounded(x).tolist() == [1.5, -0.5]
    assert rounded(x, how="down").tolist() == [1, -1]
    assert rounded(x, how="up").tolist() == [2, 0]
