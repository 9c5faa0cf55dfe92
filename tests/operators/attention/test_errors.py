"""foo::attention refuses bad input, eager and fake: the argument, its requirement, its value."""

import functools

import pytest
import torch
from support.attention_errors import (
    GRADIENTS,
    OPTIONS,
    other_device,
    packed,
    raises,
)


def attention(device, *shapes, dtype=torch.float32, bias=None, **keywords):
    """Call attention with these shapes; the defaults are (2, 4, 5, 8) and (2, 4, 7, 8) twice."""
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
            [(2, 4, 5, 0), (2, 4, 7, 0)],
            "attention: query must have a head dimension of at least 1, got 0",
        ),
        (
            [QUERY, KEY, (2, 4, 7, 0)],
            "attention: value must have a head dimension of at least 1, got 0",
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


PER_HEAD = {
    "alibi_slopes": "[Hq] = [4] or [B, Hq] = [2, 4]",
    "sinks": "[Hq] = [4] or [B, Hq] = [2, 4]",
}


@pytest.mark.parametrize(
    ("name", "shape", "printed"),
    [
        ("alibi_slopes", (3,), "[3]"),
        ("alibi_slopes", (3, 4), "[3, 4]"),
        ("alibi_slopes", (1, 4), "[1, 4]"),
        ("alibi_slopes", (4, 2), "[4, 2]"),
        ("alibi_slopes", (2, 4, 1), "[2, 4, 1]"),
        ("alibi_slopes", (), "[]"),
        ("sinks", (1,), "[1]"),
        ("sinks", (3, 4), "[3, 4]"),
        ("sinks", (), "[]"),
    ],
)
def test_attention_shapes_of_what_a_head_has(name, shape, printed, mode, device):
    message = f"attention: {name} must have shape {PER_HEAD[name]}, got {printed}"
    with mode, raises(ValueError, message):
        attention(device, **{name: torch.zeros(shape, device=device)})


@pytest.mark.parametrize(
    ("dtype", "wrong", "allowed"),
    [
        (torch.float32, "float64", "float32"),
        (torch.float32, "bfloat16", "float32"),
        (torch.float64, "bfloat16", "float32 or float64 as query is"),
        (torch.bfloat16, "int64", "float32 or bfloat16 as query is"),
        (torch.float16, "bool", "float32 or float16 as query is"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PER_HEAD)
def test_attention_dtypes_of_what_a_head_has(name, dtype, wrong, allowed, mode, device):
    with mode, raises(TypeError, f"attention: {name} must be {allowed}, got {wrong}"):
        tensor = torch.zeros(4, dtype=getattr(torch, wrong), device=device)
        attention(device, dtype=dtype, **{name: tensor})


@pytest.mark.parametrize(("name", "value", "message"), OPTIONS)
def test_attention_options(name, value, message, mode, device):
    with mode, raises(ValueError, f"attention: {name} {message}"):
        attention(device, **{name: value})


SHAPES = {
    **dict.fromkeys(("query", "key", "value"), (2, 4, 7, 8)),
    "attn_bias": (7, 7),
    "alibi_slopes": (2, 4),
    "sinks": (4,),
}


@pytest.mark.parametrize("name", list(SHAPES)[1:])
@other_device
def test_attention_mixed_devices(name, own, other):
    tensors = {
        argument: torch.zeros(shape, device=other if argument == name else own)
        for argument, shape in SHAPES.items()
    }
    with raises(ValueError, f"attention: {name} must be on {own} as query is, got {other}"):
        torch.ops.foo.attention(**tensors)


@pytest.mark.parametrize("attn_bias_requires_grad", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_attention_backward_reads_nothing_outside_its_tensors(
    name, attn_bias_requires_grad, mode, device
):
    """The backward operators are public, so they check their arguments themselves."""
    with mode:
        rows, columns = torch.zeros(2, 4, 5, device=device), torch.zeros(2, 4, 5, 8, device=device)
        tensors = {
            "grad_output": columns,
            "grad_logsumexp": rows,
            "query": torch.zeros(QUERY, device=device),
            "key": torch.zeros(KEY, device=device),
            "value": torch.zeros(KEY, device=device),
            "attn_bias": torch.zeros(5, 7, device=device),
            "alibi_slopes": torch.zeros(4, device=device),
            "sinks": torch.zeros(4, device=device),
            "output": columns,
            "logsumexp": rows,
            "seed": torch.zeros(1, dtype=torch.int64, device=device),
        }
        call = functools.partial(
            torch.ops.foo.attention_backward,
            attn_bias_requires_grad=attn_bias_requires_grad,
            dropout_p=0.5,
        )
        call(**tensors)
        good = tensors[name]
        tensors[name] = good[:, :, :4]
        wanted, got = list(good.shape), list(tensors[name].shape)
        message = f"attention_backward: {name} must have shape {wanted}, got {got}"
        with raises(ValueError, message):
            call(**tensors)
        tensors[name] = good.double()
        with raises(TypeError, f"attention_backward: {name} must be float32, got float64"):
            call(**tensors)


def takers_of_a_seed(device):
    """Return each operator with the name at the start of its messages."""
    rows, columns = torch.zeros(2, 4, 5, device=device), torch.zeros(2, 4, 5, 8, device=device)
    query, key = torch.zeros(QUERY, device=device), torch.zeros(KEY, device=device)
    packed_rows = torch.zeros(4, 9, device=device)
    packed_columns = torch.zeros(9, 4, 8, device=device)
    sequences = packed(device)
    operators = torch.ops.foo
    return {
        "attention": functools.partial(operators.attention_seeded, query, key, key),
        "attention_backward": functools.partial(
            operators.attention_backward,
            *(columns, rows, query, key, key, None, None, None, columns, rows),
        ),
        "attention_varlen": functools.partial(operators.attention_varlen_seeded, **sequences),
        "attention_varlen_backward": functools.partial(
            operators.attention_varlen_backward,
            **dict.fromkeys(("seqused_k", "block_table", "alibi_slopes", "sinks")),
            **dict.fromkeys(("grad_output", "output"), packed_columns),
            **dict.fromkeys(("grad_logsumexp", "logsumexp"), packed_rows),
            **sequences,
        ),
    }


takers = pytest.mark.parametrize(
    "name",
    ["attention", "attention_backward", "attention_varlen", "attention_varlen_backward"],
)


WHEN = "must be given if dropout_p is not 0, and only then"


@pytest.mark.parametrize(
    ("seed", "dropout_p", "error", "message"),
    [
        (None, 0.5, ValueError, f"{WHEN}, got None with dropout_p 0.5"),
        ([1], 0.0, ValueError, f"{WHEN}, got one with dropout_p 0"),
        ([1.0], 0.5, TypeError, "must be int64, got float32"),
        ([1, 2], 0.5, ValueError, "must have 1 element, got 2"),
    ],
)
@takers
def test_attention_seed(name, seed, dropout_p, error, message, mode, device):
    with mode:
        seed = None if seed is None else torch.tensor(seed, device=device)
        call = takers_of_a_seed(device)[name]
        with raises(error, f"{name}: seed {message}"):
            call(seed=seed, dropout_p=dropout_p)


@takers
@other_device
def test_attention_seed_on_another_device(name, own, other):
    seed = torch.zeros(1, dtype=torch.int64, device=other)
    with raises(ValueError, f"{name}: seed must be on {own} as query is, got {other}"):
        takers_of_a_seed(own)[name](seed=seed, dropout_p=0.5)


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        ([1.0], TypeError, "must be int64, got float32"),
        ([1, 2], ValueError, "must have 1 element, got 2"),
    ],
)
def test_attention_dropout_mask_seed(seed, error, message, mode, device):
    with mode, raises(error, f"attention_dropout_mask: seed {message}"):
        seed = torch.tensor(seed, device=device)
        torch.ops.foo.attention_dropout_mask(seed, (1, 2, 3, 4), 0.5, dtype=torch.float32)


@pytest.mark.parametrize(
    ("replaced", "error", "message"),
    [
        ({"shape": (2, 3)}, ValueError, "shape must have 4 dimensions, got 2"),
        ({"dtype": torch.float16}, TypeError, "dtype must be float32 or float64, got float16"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be at least 0 and less than 1, got 1.5"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must be at least 0 and less than 1, got -0.1"),
    ],
)
def test_attention_dropout_mask(replaced, error, message, mode, device):
    with mode:
        seed = torch.zeros(1, dtype=torch.int64, device=device)
        good = {"shape": (1, 2, 3, 4), "dropout_p": 0.5, "dtype": torch.float32}
        torch.ops.foo.attention_dropout_mask(seed, **good)
        with raises(error, f"attention_dropout_mask: {message}"):
            torch.ops.foo.attention_dropout_mask(seed, **(good | replaced))


def test_attention_backward_has_no_gradient_of_a_mask(mode, device):
    with mode:
        rows, columns = torch.zeros(2, 4, 5, device=device), torch.zeros(2, 4, 5, 8, device=device)
        query, key = torch.zeros(QUERY, device=device), torch.zeros(KEY, device=device)
        mask = torch.ones(5, 7, dtype=torch.bool, device=device)
        for bias, error, message in (
            (mask, TypeError, "must be floating-point if attn_bias_requires_grad, got bool"),
            (None, ValueError, "must be given if attn_bias_requires_grad, got None"),
        ):
            with raises(error, f"attention_backward: attn_bias {message}"):
                torch.ops.foo.attention_backward(
                    *(columns, rows, query, key, key, bias, None, None, columns, rows, None),
                    attn_bias_requires_grad=True,
                )
