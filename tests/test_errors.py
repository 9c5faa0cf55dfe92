"""Bad input is refused word for word: argument, requirement, and what came; eager and fake."""

import contextlib
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

import foo_ops


def raises(error, message):
    """With exactly this message, but for the note on where C++ raised it."""
    return pytest.raises(error, match=rf"\A{re.escape(message)}\Z")


@pytest.fixture(params=["eager", "fake"])
def mode(request):
    """Both the operators and their fake kernels."""
    return FakeTensorMode() if request.param == "fake" else contextlib.nullcontext()


def attention(device, *shapes, dtype=torch.float32, bias=None, **keywords):
    """Call attention with tensors of these shapes; by default (2, 4, 5, 8), (2, 4, 7, 8) twice."""
    shapes = [*shapes, *((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8))[len(shapes) :]]
    tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    if bias is not None:
        tensors.append(torch.zeros(bias[0], dtype=bias[1], device=device))
    torch.ops.foo.attention(*tensors, **keywords)


QUERY, KEY = (2, 4, 5, 8), (2, 4, 7, 8)
BROADCAST = "attention: attn_bias must have a shape that broadcasts to [2, 4, 5, 7], got "


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            [(4, 5, 8)],
            "attention: query must have 4 dimensions (batch, heads, length, head_dim), got 3",
        ),
        (
            [QUERY, (4, 7, 8)],
            "attention: key must have 4 dimensions (batch, heads, length, head_dim), got 3",
        ),
        (
            [QUERY, KEY, (1, 2, 4, 7, 8)],
            "attention: value must have 4 dimensions (batch, heads, length, head_dim), got 5",
        ),
        ([QUERY, (3, 4, 7, 8)], "attention: key must have batch size 2 as query has, got 3"),
        ([QUERY, KEY, (1, 4, 7, 8)], "attention: value must have batch size 2 as query has, got 1"),
        ([QUERY, (2, 4, 7, 9)], "attention: key must have head dimension 8 as query has, got 9"),
        ([QUERY, KEY, (2, 2, 7, 8)], "attention: value must have 4 heads as key has, got 2"),
        ([QUERY, KEY, (2, 4, 6, 8)], "attention: value must have length 7 as key has, got 6"),
        (
            [(2, 6, 5, 8)],
            "attention: query must have a multiple of key's 4 heads, got 6",
        ),
        (
            [QUERY, (2, 0, 7, 8), (2, 0, 7, 8)],
            "attention: query must have 0 heads as key has, got 4",
        ),
        (
            [(2, 4, 5, 300), (2, 4, 7, 300)],
            "attention: query must have a head dimension from 1 to 256, got 300",
        ),
        (
            [(2, 4, 5, 0), (2, 4, 7, 0)],
            "attention: query must have a head dimension from 1 to 256, got 0",
        ),
        (
            [QUERY, KEY, (2, 4, 7, 257)],
            "attention: value must have a head dimension from 1 to 256, got 257",
        ),
    ],
)
def test_attention_shapes(shapes, message, mode, device):
    with mode, raises(ValueError, message):
        attention(device, *shapes)


@pytest.mark.parametrize(
    ("shape", "printed"),
    [
        ((3, 7), "[3, 7]"),
        ((5, 6), "[5, 6]"),
        ((5, 0), "[5, 0]"),
        ((3, 1, 1, 1), "[3, 1, 1, 1]"),
        ((1, 2, 4, 5, 7), "[1, 2, 4, 5, 7]"),
        ((2, 1, 5), "[2, 1, 5]"),
    ],
)
def test_attention_bias_shape(shape, printed, mode, device):
    with mode, raises(ValueError, BROADCAST + printed):
        attention(device, bias=(shape, torch.float32))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool], ids=str)
def test_attention_dtype(dtype, mode, device):
    name = str(dtype).removeprefix("torch.")
    message = f"attention: query must be float16, bfloat16, float32 or float64, got {name}"
    with mode, raises(TypeError, message):
        attention(device, dtype=dtype)


@pytest.mark.parametrize("name", ["key", "value"])
def test_attention_mixed_dtypes(name, mode, device):
    message = f"attention: {name} must be float32 as query is, got float64"
    with mode, raises(TypeError, message):
        tensors = {
            argument: torch.zeros(
                KEY, dtype=torch.float64 if argument == name else torch.float32, device=device
            )
            for argument in ("query", "key", "value")
        }
        torch.ops.foo.attention(**tensors)


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [
        (torch.float32, "bool or float32"),
        (torch.float64, "bool, float32 or float64 as query is"),
        (torch.bfloat16, "bool, float32 or bfloat16 as query is"),
    ],
    ids=str,
)
def test_attention_bias_dtype(dtype, allowed, mode, device):
    with mode, raises(TypeError, f"attention: attn_bias must be {allowed}, got int64"):
        attention(device, dtype=dtype, bias=((5, 7), torch.int64))


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("softcap", 2.0, "softcap is not supported yet, it must be 0.0, got 2"),
        ("dropout_p", 0.1, "dropout_p is not supported yet, it must be 0.0, got 0.1"),
        ("window_left", 3, "window_left is not supported yet, it must be -1, got 3"),
        ("window_right", 0, "window_right is not supported yet, it must be -1, got 0"),
    ],
)
def test_attention_options_to_come(keyword, value, message, mode, device):
    with mode, raises(NotImplementedError, f"attention: {message}"):
        attention(device, **{keyword: value})


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_attention_tensors_to_come(name, mode, device):
    with (
        mode,
        raises(NotImplementedError, f"attention: {name} is not supported yet, it must be None"),
    ):
        attention(device, **{name: torch.zeros(4, device=device)})


@pytest.mark.parametrize("name", ["key", "value", "attn_bias"])
@pytest.mark.parametrize(("own", "other"), [("cpu", "foo:0"), ("foo:0", "cpu"), ("foo:0", "foo:1")])
def test_attention_mixed_devices(name, own, other):
    tensors = {
        argument: torch.zeros(7, 7) if argument == "attn_bias" else torch.zeros(2, 4, 7, 8)
        for argument in ("query", "key", "value", "attn_bias")
    }
    tensors = {
        argument: tensor.to(other if argument == name else own)
        for argument, tensor in tensors.items()
    }
    with raises(ValueError, f"attention: {name} must be on {own} as query is, got {other}"):
        torch.ops.foo.attention(**tensors)


GRADIENTS = ("grad_output", "grad_logsumexp", "output", "logsumexp")


@pytest.mark.parametrize("backward", ["attention_backward", "attention_bias_backward"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_attention_backward_reads_nothing_outside_its_tensors(name, backward, mode, device):
    """The operators of the backward pass are public, too."""
    with mode:
        rows, columns = torch.zeros(2, 4, 5, device=device), torch.zeros(2, 4, 5, 8, device=device)
        tensors = {
            "grad_output": columns,
            "grad_logsumexp": rows,
            "query": torch.zeros(QUERY, device=device),
            "key": torch.zeros(KEY, device=device),
            "value": torch.zeros(KEY, device=device),
            "attn_bias": torch.zeros(5, 7, device=device),
            "output": columns,
            "logsumexp": rows,
        }
        call = getattr(torch.ops.foo, backward)
        call(**tensors, is_causal=False, scale=None)
        good = tensors[name]
        tensors[name] = good[:, :, :4]
        wanted, got = list(good.shape), list(tensors[name].shape)
        message = f"attention_backward: {name} must have shape {wanted}, got {got}"
        with raises(ValueError, message):
            call(**tensors, is_causal=False, scale=None)
        tensors[name] = good.double()
        with raises(TypeError, f"attention_backward: {name} must be float32, got float64"):
            call(**tensors, is_causal=False, scale=None)


def test_attention_gradients_cannot_be_differentiated(device):
    x = torch.randn(1, 1, 3, 4, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(foo_ops.attention(x, x, x).sum(), x, create_graph=True)
    with raises(NotImplementedError, "attention: its gradients cannot be differentiated again yet"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("operator", "allowed"),
    [
        ("abs", "an integer, floating-point or complex dtype"),
        ("abs_", "an integer or floating-point dtype"),
    ],
)
def test_abs_dtype(operator, allowed, mode, device):
    with mode, raises(TypeError, f"{operator}: input must have {allowed}, got bool"):
        getattr(torch.ops.foo, operator)(torch.zeros(3, dtype=torch.bool, device=device))


def test_abs_out_dtype(mode, device):
    message = "abs: out must have a dtype that float32 can be cast to, got int64"
    with mode, raises(TypeError, message):
        out = torch.zeros(3, dtype=torch.int64, device=device)
        foo_ops.abs(torch.zeros(3, device=device), out=out)
