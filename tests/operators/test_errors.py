"""Bad input is refused word for word: argument, requirement, and what came; eager and fake."""

import contextlib
import functools
import math
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
    "sinks": "[Hq] = [4]",
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
        ("sinks", (2, 4), "[2, 4]"),
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


OPTIONS = [
    *(
        ("dropout_p", value, f"must be at least 0 and less than 1, got {printed}")
        for value, printed in ((1.0, "1"), (1.5, "1.5"), (-0.1, "-0.1"), (math.nan, "nan"))
    ),
    *(
        (name, value, f"must be at least 0, or -1 for no bound, got {value}")
        for name in ("window_left", "window_right")
        for value in (-2, -(2**40))
    ),
    *(
        ("softcap", value, f"must be positive and finite, or 0 for none, got {value:g}")
        for value in (-1.0, -0.5, math.inf, -math.inf, math.nan)
    ),
]


@pytest.mark.parametrize(("name", "value", "message"), OPTIONS)
def test_attention_options(name, value, message, mode, device):
    with mode, raises(ValueError, f"attention: {name} {message}"):
        attention(device, **{name: value})


other_device = pytest.mark.parametrize(
    ("own", "other"), [("cpu", "foo:0"), ("foo:0", "cpu"), ("foo:0", "foo:1")]
)
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


GRADIENTS = ("grad_output", "grad_logsumexp", "output", "logsumexp")


@pytest.mark.parametrize("bias_requires_grad", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_attention_backward_reads_nothing_outside_its_tensors(
    name, bias_requires_grad, mode, device
):
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
            "alibi_slopes": torch.zeros(4, device=device),
            "sinks": torch.zeros(4, device=device),
            "output": columns,
            "logsumexp": rows,
            "seed": torch.zeros(1, dtype=torch.int64, device=device),
        }
        call = functools.partial(
            torch.ops.foo.attention_backward, bias_requires_grad=bias_requires_grad, dropout_p=0.5
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
    """Each with the name that its messages begin with."""
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
            (mask, TypeError, "must be floating-point if bias_requires_grad, got bool"),
            (None, ValueError, "must be given if bias_requires_grad, got None"),
        ):
            with raises(error, f"attention_backward: attn_bias {message}"):
                torch.ops.foo.attention_backward(
                    *(columns, rows, query, key, key, bias, None, None, columns, rows, None),
                    bias_requires_grad=True,
                )


# ------------------------------------------------------------------------------ attention_varlen


def packed(device, **replaced):
    """Arguments of attention_varlen: two sequences, with 4 and 5 queries, and 7 and 5 keys.

    A tensor is given by its elements if these are integers, else by its shape.
    """
    arguments = {
        "query": (9, 4, 8),
        "key": (12, 4, 8),
        "value": (12, 4, 8),
        "cu_seqlens_q": [0, 4, 9],
        "cu_seqlens_k": [0, 7, 12],
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
    }
    return make(device, arguments | replaced)


def paged(device, **replaced):
    """The same with 7 blocks of 4 keys, of which each sequence has up to 3."""
    blocks = {
        "key": (7, 4, 4, 8),
        "value": (7, 4, 4, 8),
        "block_table": [[6, 0, -1], [3, 2, -1]],
    }
    return packed(device, **(blocks | replaced))


def make(device, arguments):
    def tensor(value):
        if isinstance(value, tuple):
            return torch.zeros(value, device=device)
        return torch.tensor(value, dtype=torch.int32, device=device)

    return {
        name: tensor(value) if isinstance(value, (tuple, list)) else value
        for name, value in arguments.items()
    }


def varlen(arguments):
    torch.ops.foo.attention_varlen(**arguments)


@pytest.mark.parametrize("make", [packed, paged])
@pytest.mark.parametrize("name", GRADIENTS)
def test_varlen_backward_reads_nothing_outside_its_tensors(name, make, mode, device):
    with mode:
        arguments = make(device)
        rows, columns = torch.zeros(4, 9, device=device), torch.zeros(9, 4, 8, device=device)
        arguments |= {"grad_output": columns, "output": columns}
        arguments |= {"grad_logsumexp": rows, "logsumexp": rows}
        nothing = dict.fromkeys(("seqused_k", "block_table", "alibi_slopes", "sinks", "seed"))
        arguments = nothing | arguments
        call = torch.ops.foo.attention_varlen_backward
        call(**arguments)
        good = arguments[name]
        arguments[name] = good[:3]
        wanted, got = list(good.shape), list(arguments[name].shape)
        message = f"attention_varlen_backward: {name} must have shape {wanted}, got {got}"
        with raises(ValueError, message):
            call(**arguments)
        arguments[name] = good.double()
        with raises(TypeError, f"attention_varlen_backward: {name} must be float32, got float64"):
            call(**arguments)


def test_varlen_arguments_are_good_unchanged(mode, device):
    """What each test below changes one thing of."""
    with mode:
        varlen(packed(device))
        varlen(packed(device, seqused_k=[0, 5]))
        varlen(paged(device))
        varlen(paged(device, seqused_k=[8, 0], max_seqlen_k=8))


@pytest.mark.parametrize(
    ("make", "replaced", "message"),
    [
        (
            packed,
            {"query": (1, 9, 4, 8)},
            "query must have 3 dimensions (total, heads, head_dim), got 4",
        ),
        (
            packed,
            {"key": (7, 4, 4, 8)},
            "key must have 3 dimensions (total, heads, head_dim), got 4",
        ),
        (
            packed,
            {"value": (12, 8)},
            "value must have 3 dimensions (total, heads, head_dim), got 2",
        ),
        (
            paged,
            {"key": (12, 4, 8)},
            "key must have 4 dimensions (num_blocks, block_size, heads, head_dim), got 3",
        ),
        (
            paged,
            {"value": (12, 4, 8)},
            "value must have 4 dimensions (num_blocks, block_size, heads, head_dim), got 3",
        ),
        (
            packed,
            {"query": (9, 4, 0), "key": (12, 4, 0)},
            "query must have a head dimension of at least 1, got 0",
        ),
        (
            packed,
            {"value": (12, 4, 0)},
            "value must have a head dimension of at least 1, got 0",
        ),
        (packed, {"key": (12, 4, 9)}, "key must have head dimension 8 as query has, got 9"),
        (paged, {"key": (7, 4, 4, 9)}, "key must have head dimension 8 as query has, got 9"),
        (packed, {"value": (12, 2, 8)}, "value must have 4 heads as key has, got 2"),
        (paged, {"value": (7, 4, 2, 8)}, "value must have 4 heads as key has, got 2"),
        (packed, {"value": (11, 4, 8)}, "value must have length 12 as key has, got 11"),
        (paged, {"value": (6, 4, 4, 8)}, "value must have 7 blocks as key has, got 6"),
        (paged, {"value": (7, 8, 4, 8)}, "value must have block size 4 as key has, got 8"),
        (
            paged,
            {"key": (7, 0, 4, 8), "value": (7, 0, 4, 8)},
            "key must have a block size of at least 1, got 0",
        ),
        (packed, {"query": (9, 6, 8)}, "query must have a multiple of key's 4 heads, got 6"),
        (
            packed,
            {"key": (12, 0, 8), "value": (12, 0, 8)},
            "query must have 0 heads as key has, got 4",
        ),
        *(
            (packed, {name: [[0, 4, 9]]}, f"{name} must have 1 dimension, got 2")
            for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        ),
        (packed, {"cu_seqlens_q": []}, "cu_seqlens_q must have at least 1 element, got 0"),
        (
            packed,
            {"cu_seqlens_k": [0, 7, 9, 12]},
            "cu_seqlens_k must have 3 elements as cu_seqlens_q has, got 4",
        ),
        (
            packed,
            {"seqused_k": [1, 2, 3]},
            "seqused_k must have 2 elements, one for each sequence, got 3",
        ),
        (
            paged,
            {"block_table": [0, 1]},
            "block_table must have 2 dimensions (batch, max_blocks), got 1",
        ),
        (
            paged,
            {"block_table": [[0, 1]] * 3},
            "block_table must have 2 rows, one for each sequence, got 3",
        ),
        (
            packed,
            {"alibi_slopes": (3, 4)},
            "alibi_slopes must have shape [Hq] = [4] or [B, Hq] = [2, 4], got [3, 4]",
        ),
        (packed, {"sinks": (2, 4)}, "sinks must have shape [Hq] = [4], got [2, 4]"),
        *((packed, {name: value}, f"{name} {message}") for name, value, message in OPTIONS),
    ],
)
def test_varlen_shapes_and_options(make, replaced, message, mode, device):
    with mode, raises(ValueError, f"attention_varlen: {message}"):
        varlen(make(device, **replaced))


FLOATING = "float16, bfloat16, float32 or float64"


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("query", torch.int64, f"query must be {FLOATING}, got int64"),
        ("key", torch.float64, "key must be float32 as query is, got float64"),
        ("value", torch.bfloat16, "value must be float32 as query is, got bfloat16"),
        *(
            (name, torch.int64, f"{name} must be int32, got int64")
            for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
        ),
        ("alibi_slopes", torch.float64, "alibi_slopes must be float32, got float64"),
        ("sinks", torch.bfloat16, "sinks must be float32, got bfloat16"),
    ],
)
def test_varlen_dtypes(name, dtype, message, mode, device):
    with mode, raises(TypeError, f"attention_varlen: {message}"):
        arguments = paged(device, seqused_k=[1, 2], alibi_slopes=(4,), sinks=(4,))
        varlen(arguments | {name: arguments[name].to(dtype)})


@pytest.mark.parametrize(
    "name",
    [
        *("key", "value", "cu_seqlens_q", "cu_seqlens_k"),
        *("seqused_k", "block_table", "alibi_slopes", "sinks"),
    ],
)
@other_device
def test_varlen_mixed_devices(name, own, other):
    arguments = paged(own, seqused_k=[1, 2], alibi_slopes=(4,), sinks=(4,))
    message = f"attention_varlen: {name} must be on {own} as query is, got {other}"
    with raises(ValueError, message):
        varlen(arguments | {name: arguments[name].to(other)})


@pytest.mark.parametrize(
    ("make", "replaced", "message"),
    [
        *(
            (make, {name: [1, 4, 9]}, f"{name} must start at 0, got 1")
            for make in (packed, paged)
            for name in ("cu_seqlens_q", "cu_seqlens_k")
        ),
        (packed, {"cu_seqlens_q": [-1, 4, 9]}, "cu_seqlens_q must start at 0, got -1"),
        *(
            (make, replaced | {name: [0, 5, 3, 9]}, f"{name} must not decrease, got 3 after 5")
            for make, replaced in (
                (packed, {"cu_seqlens_q": [0, 1, 2, 9], "cu_seqlens_k": [0, 1, 2, 12]}),
                (
                    paged,
                    {
                        "cu_seqlens_q": [0, 1, 2, 9],
                        "cu_seqlens_k": [0, 1, 2, 12],
                        "block_table": [[0, 1, 2]] * 3,
                    },
                ),
            )
            for name in ("cu_seqlens_q", "cu_seqlens_k")
        ),
        (
            packed,
            {"cu_seqlens_q": [0, -(2**31), 9]},
            f"cu_seqlens_q must not decrease, got {-(2**31)} after 0",
        ),
        (packed, {"cu_seqlens_q": [0, 4, 8]}, "cu_seqlens_q must end at 9 as query has, got 8"),
        (packed, {"cu_seqlens_q": [0, 4, 10]}, "cu_seqlens_q must end at 9 as query has, got 10"),
        (paged, {"cu_seqlens_q": [0, 4, 10]}, "cu_seqlens_q must end at 9 as query has, got 10"),
        (packed, {"cu_seqlens_k": [0, 7, 11]}, "cu_seqlens_k must end at 12 as key has, got 11"),
        (packed, {"cu_seqlens_k": [0, 7, 13]}, "cu_seqlens_k must end at 12 as key has, got 13"),
        (
            packed,
            {"cu_seqlens_q": [0], "cu_seqlens_k": [0]},
            "cu_seqlens_q must end at 9 as query has, got 0",
        ),
        (
            packed,
            {"seqused_k": [7, 6]},
            "seqused_k must be from 0 to 5 for sequence 1, got 6",
        ),
        (
            packed,
            {"seqused_k": [-1, 5]},
            "seqused_k must be from 0 to 7 for sequence 0, got -1",
        ),
        (
            paged,
            {"seqused_k": [8, 13], "max_seqlen_k": 13},
            "seqused_k must be from 0 to 12 for sequence 1, got 13",
        ),
        (
            paged,
            {"cu_seqlens_k": [0, 7, 20], "max_seqlen_k": 13},
            "cu_seqlens_k must give sequence 1 at most 12 keys as block_table holds, got 13",
        ),
        (
            paged,
            {"block_table": [[6, 0, -1], [3, 7, -1]]},
            "block_table must have block numbers from 0 to 6, got 7 for sequence 1",
        ),
        (
            paged,
            {"block_table": [[6, -1, 0], [3, 2, 1]]},
            "block_table must have block numbers from 0 to 6, got -1 for sequence 0",
        ),
        (
            paged,
            {"seqused_k": [4, 9], "max_seqlen_k": 9},
            "block_table must have block numbers from 0 to 6, got -1 for sequence 1",
        ),
        (
            paged,
            {"block_table": [[6, 2**31 - 1, 0], [3, 2, 1]]},
            f"block_table must have block numbers from 0 to 6, got {2**31 - 1} for sequence 0",
        ),
        *(
            (
                make,
                {"max_seqlen_q": value},
                f"max_seqlen_q must be at least 5 as the longest sequence has, got {value}",
            )
            for make in (packed, paged)
            for value in (4, 0, -1)
        ),
        *(
            (
                make,
                {"max_seqlen_k": 6},
                "max_seqlen_k must be at least 7 as the longest sequence has, got 6",
            )
            for make in (packed, paged)
        ),
        (
            packed,
            {"seqused_k": [3, 5], "max_seqlen_k": 4},
            "max_seqlen_k must be at least 5 as the longest sequence has, got 4",
        ),
    ],
)
def test_varlen_values(make, replaced, message, device):
    """These are in the tensors' memory: only the operator itself can see them."""
    with raises(ValueError, f"attention_varlen: {message}"):
        varlen(make(device, **replaced))


# ------------------------------------------------------------------------ nothing is changed


REFUSED = {
    "attention, softcap": lambda device: {
        **dict.fromkeys(("query", "key", "value"), torch.zeros(QUERY, device=device)),
        "softcap": -1.0,
    },
    "attention, dropout_p": lambda device: {
        **dict.fromkeys(("query", "key", "value"), torch.zeros(QUERY, device=device)),
        "dropout_p": 1.5,
    },
    "attention_varlen, softcap": lambda device: packed(device, softcap=-1.0),
    "attention_varlen, cu_seqlens_q": lambda device: packed(device, cu_seqlens_q=[0, 4, 8]),
    "attention_varlen, seqused_k": lambda device: packed(device, seqused_k=[7, 6]),
    "attention_varlen, block_table": lambda device: paged(device, block_table=[[6, 7], [3, 2]]),
    "attention_varlen, max_seqlen_k": lambda device: paged(device, max_seqlen_k=6),
}


@pytest.mark.parametrize("way", ["no gradient", "gradient", "vmap"])
@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_drawn_for_a_refused_call(name, way, device):
    """Dropout finds its generator as it was."""
    operator, argument = name.split(", ")
    arguments = {"dropout_p": 0.5} | REFUSED[name](device)
    query = arguments.pop("query").clone().requires_grad_(way == "gradient")

    def call(query):
        return getattr(torch.ops.foo, operator)(query, **arguments)

    if way == "vmap":
        query, call = query.unsqueeze(0), torch.vmap(call, randomness="same")
    generator = torch if device == "cpu" else torch.foo
    state = generator.get_rng_state()
    with pytest.raises(ValueError, match=rf"\A{operator}: {argument} must "):
        call(query)
    assert torch.equal(generator.get_rng_state(), state)


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
