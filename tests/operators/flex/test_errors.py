"""The operators of flex attention refuse bad input with the same words, eager and fake."""

import pytest
import torch
from support.attention_errors import GRADIENTS, other_device, packed, raises
from torch.nn.attention.flex_attention import create_block_mask

import foo_ops

NAMES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
SHAPES = {
    "query": (2, 4, 9, 8),
    "key": (2, 2, 11, 8),
    "value": (2, 2, 11, 6),
    "kv_num_blocks": (1, 4, 2),
    "kv_indices": (1, 4, 2, 3),
    "full_kv_num_blocks": (1, 4, 2),
    "full_kv_indices": (1, 4, 2, 3),
}


def arguments(device, **replaced):
    """Make arguments; a shape stands for zeros, of int32 for lists of blocks."""
    given = {**SHAPES, "captured": [], "query_block": 5, "key_block": 4, **replaced}
    return {
        name: torch.zeros(value, dtype=torch.int32 if name in NAMES else None, device=device)
        if isinstance(value, tuple)
        else value
        for name, value in given.items()
    }


def call(given):
    return torch.ops.foo.flex_attention(**given)


def packed_call(given):
    return torch.ops.foo.flex_attention_varlen(**({"captured": []} | given))


def test_arguments_are_good_unchanged(mode, device):
    """Each test below changes one of these arguments."""
    with mode:
        call(arguments(device))
        call(arguments(device, **dict.fromkeys(NAMES)))
        call(arguments(device, **dict.fromkeys(NAMES[2:])))
        packed_call(packed(device))


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"query": (4, 9, 8)},
            "query must have 4 dimensions (batch, heads, length, head_dim), got 3",
        ),
        ({"key": (2, 2, 11, 7)}, "key must have head dimension 8 as query has, got 7"),
        ({"value": (2, 2, 10, 6)}, "value must have length 11 as key has, got 10"),
        (
            {"key": (2, 3, 11, 8), "value": (2, 3, 11, 6)},
            "query must have a multiple of key's 3 heads, got 4",
        ),
        ({"query_block": 0}, "query_block must be at least 1, got 0"),
        ({"key_block": -3}, "key_block must be at least 1, got -3"),
        ({"kv_num_blocks": (4, 2)}, "kv_num_blocks must have 3 dimensions, got 2"),
        ({"kv_indices": (1, 4, 2)}, "kv_indices must have 4 dimensions, got 3"),
        ({"full_kv_num_blocks": (1, 4, 2, 1)}, "full_kv_num_blocks must have 3 dimensions, got 4"),
        ({"full_kv_indices": (3,)}, "full_kv_indices must have 4 dimensions, got 1"),
        (
            {"kv_indices": None},
            "kv_num_blocks and kv_indices must be given together, got one of them",
        ),
        (
            {"full_kv_num_blocks": None},
            "full_kv_num_blocks and full_kv_indices must be given together, got one of them",
        ),
        (
            {"kv_num_blocks": None, "kv_indices": None},
            "kv_num_blocks must be given if full_kv_num_blocks is given, got None",
        ),
        (
            {"kv_num_blocks": (3, 4, 2), "kv_indices": (3, 4, 2, 3)},
            "kv_num_blocks must have 1 or 2 rows of the batch as query has, got 3",
        ),
        (
            {"kv_num_blocks": (1, 2, 2), "kv_indices": (1, 2, 2, 3)},
            "kv_num_blocks must have 1 or 4 heads as query has, got 2",
        ),
        (
            {"kv_num_blocks": (1, 4, 1), "kv_indices": (1, 4, 1, 3)},
            "kv_num_blocks must have a row for each block of 5 of the 9 queries, got 1",
        ),
        (
            {"kv_indices": (2, 4, 2, 3)},
            "kv_indices must have the leading dimensions [1, 4, 2] as kv_num_blocks has, got "
            "[2, 4, 2, 3]",
        ),
        (
            {"full_kv_num_blocks": (2, 4, 2), "full_kv_indices": (2, 4, 2, 3)},
            "full_kv_num_blocks must have shape [1, 4, 2] as kv_num_blocks has, got [2, 4, 2]",
        ),
    ],
    ids=str,
)
def test_shapes(replaced, message, mode, device):
    with mode, raises(ValueError, f"flex_attention: {message}"):
        call(arguments(device, **replaced))


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_of_int32(name, mode, device):
    with mode:
        given = arguments(device)
        given[name] = given[name].long()
        with raises(TypeError, f"flex_attention: {name} must be int32, got int64"):
            call(given)


@other_device
@pytest.mark.parametrize("name", [*NAMES, "captured"])
def test_devices(name, own, other, mode):
    with mode:
        given = arguments(own)
        elsewhere = torch.zeros(SHAPES.get(name, (3,)), dtype=torch.int32, device=other)
        given[name] = [elsewhere] if name == "captured" else elsewhere
        what = "captured tensor 0" if name == "captured" else name
        own = given["query"].device
        message = f"flex_attention: {what} must be on {own} as query is, got {elsewhere.device}"
        with raises(ValueError, message):
            call(given)


@pytest.mark.parametrize("operator", [call, packed_call])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 1, 1, 1, 1), "must have at most 5 dimensions, got 6"),
        ((2, 0), "must have elements, got shape [2, 0]"),
    ],
)
def test_captured_tensors(operator, shape, message, mode, device):
    name = "flex_attention" if operator is call else "flex_attention_varlen"
    with mode:
        given = arguments(device) if operator is call else packed(device)
        given["captured"] = [torch.ones(3, device=device), torch.ones(shape, device=device)]
        with raises(ValueError, f"{name}: captured tensor 1 {message}"):
            operator(given)


@pytest.mark.parametrize("name", NAMES[1::2])
@pytest.mark.parametrize(
    ("counts", "block", "message"),
    [
        (4, 0, "must have a column for each of the 4 blocks of a row, got 3"),
        (-1, 0, "must have a column for each of the -1 blocks of a row, got 3"),
        (1, -1, "must have block numbers of at least 0, got -1"),
    ],
)
def test_contents_of_lists(name, counts, block, message, device):
    given = arguments(device)
    given[NAMES[NAMES.index(name) - 1]].fill_(counts)
    given[name].fill_(block)
    with raises(ValueError, f"flex_attention: {name} {message}"):
        call(given)


def gradients(device, packed_too, **replaced):
    """Make arguments of a backward operator."""
    given = {"captured": []} | packed(device) if packed_too else arguments(device)
    if packed_too:
        columns, rows = given["query"], torch.zeros(4, 9, device=device)
    else:
        columns, rows = torch.zeros(2, 4, 9, 6, device=device), torch.zeros(2, 4, 9, device=device)
    results = {"grad_output": columns, "output": columns}
    results |= {"grad_logsumexp": rows, "logsumexp": rows, "captured_requires_grad": []}
    return given | results | replaced


@pytest.mark.parametrize("packed_too", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_backward_reads_nothing_outside_its_tensors(name, packed_too, mode, device):
    operator = torch.ops.foo.flex_attention_backward
    prefix = "flex_attention_backward"
    if packed_too:
        operator = torch.ops.foo.flex_attention_varlen_backward
        prefix = "flex_attention_varlen_backward"
    with mode:
        given = gradients(device, packed_too)
        operator(**given)
        good = given[name]
        given[name] = good[:1]
        wanted, got = list(good.shape), list(given[name].shape)
        with raises(ValueError, f"{prefix}: {name} must have shape {wanted}, got {got}"):
            operator(**given)
        given[name] = good.double()
        with raises(TypeError, f"{prefix}: {name} must be float32, got float64"):
            operator(**given)


@pytest.mark.parametrize("packed_too", [False, True])
def test_which_captured_tensors_require_a_gradient(packed_too, mode, device):
    suffix = "_varlen_backward" if packed_too else "_backward"
    operator = getattr(torch.ops.foo, f"flex_attention{suffix}")
    with mode:
        tensors = [torch.ones(3, device=device), torch.ones(2, dtype=torch.int64, device=device)]
        given = gradients(device, packed_too, captured=tensors, captured_requires_grad=[True])
        message = "captured_requires_grad must have 2 elements as captured has, got 1"
        with raises(ValueError, f"flex_attention{suffix}: {message}"):
            operator(**given)
        given["captured_requires_grad"] = [True, True]
        message = "captured tensor 1 must be floating-point to have a gradient, got int64"
        with raises(TypeError, f"flex_attention{suffix}: {message}"):
            operator(**given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "float32 atan 0\noutput 0",
            "'float32 atan 0', must have a known operation and a known dtype",
        ),
        (
            "complex64 neg 0\noutput 0",
            "'complex64 neg 0', must have a known operation and a known dtype",
        ),
        ("float32 neg 0\noutput 0", "'float32 neg 0', must have earlier lines as operands"),
        ("float32 number 1\noutput 0", "'float32 number 1', must read one of 1 numbers"),
        ("int32 integer 0\noutput 0", "'int32 integer 0', must read one of 0 integers"),
        ("float32 load 2\noutput 0", "'float32 load 2', must name one of 1 captured tensors"),
        (
            "float32 load 0\noutput 0",
            "'float32 load 0', must have an index for each of 1 dimensions, got 0",
        ),
    ],
    ids=lambda it: it.split("\n")[0],
)
def test_programs_that_do_not_fit(text, message, device):
    given = arguments(
        device, score_mod=text, numbers=[1.0], captured=[torch.ones(3, device=device)]
    )
    with raises(ValueError, f"attention_program: line 0 of a program, {message}"):
        call(given)


def test_programs_without_an_output(device):
    message = "attention_program: a program must have one of its lines as output, got 7"
    with raises(ValueError, message):
        call(arguments(device, score_mod="float32 input score\noutput 7"))


def test_a_program_reads_a_tensor_of_its_dtype(device):
    text = "int32 input key\nfloat64 load 0 0\noutput 1"
    message = (
        "attention_program: line 1 of a program, 'float64 load 0 0', must read a tensor of "
        "float64, got float32"
    )
    with raises(ValueError, message):
        call(arguments(device, score_mod=text, captured=[torch.ones(11, device=device)]))


@pytest.mark.parametrize(
    "line", ["nonsense", "float32", "float32 neg zero", "float32 input", "output 0 1", "gradient 0"]
)
def test_lines_that_are_not_of_a_program(line, device):
    message = (
        "attention_program: a line of a program must have a dtype, an operation and its "
        f"operands, got '{line}'"
    )
    with raises(ValueError, message):
        call(arguments(device, score_mod=f"float32 input score\n{line}"))


def test_programs_with_empty_lines(device):
    with raises(ValueError, "attention_program: a program must have no empty lines"):
        call(arguments(device, score_mod="float32 input score\n\noutput 0"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("float32 input row", "must read one of the inputs score, batch, head, query, key, grad"),
        ("float32 add 0", "must have 2 operands, got 1"),
        ("float32 neg 0 0", "must have 1 operands, got 2"),
        ("float32 where 0 0", "must have 3 operands, got 2"),
        ("float32 add 0 1", "must have operands of float32, float32, got float32, int32"),
        ("bool lt 1 0", "must have operands of int32, int32, got int32, float32"),
        ("float32 where 2 0 0", "must have earlier lines as operands"),
        ("float32 exp 1", "must have operands of float32, got int32"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(line, message, device):
    text = f"float32 input score\nint32 input query\n{line}\noutput 0"
    with raises(ValueError, f"attention_program: line 2 of a program, '{line}', {message}"):
        call(arguments(device, score_mod=text))


def test_the_public_function(device):
    query, key = torch.zeros(1, 4, 5, 8, device=device), torch.zeros(1, 2, 5, 8, device=device)
    message = (
        "flex_attention: key must have 4 heads as query has, or enable_gqa must be True, got 2"
    )
    with raises(ValueError, message):
        foo_ops.flex_attention(query, key, key)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 6, 7, device=device)
    message = "flex_attention: block_mask must cover 5 queries and 5 keys, got 6 and 7"
    with raises(ValueError, message):
        foo_ops.flex_attention(query, query, query, block_mask=mask)
