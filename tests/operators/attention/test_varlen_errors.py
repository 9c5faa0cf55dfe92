"""foo::attention_varlen refuses bad input word for word; a refused call draws no numbers."""

import pytest
import torch
from support.attention_errors import GRADIENTS, OPTIONS, other_device, packed, paged, raises, varlen


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
    """Each test below changes one of these arguments."""
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
        (
            packed,
            {"sinks": (3, 4)},
            "sinks must have shape [Hq] = [4] or [B, Hq] = [2, 4], got [3, 4]",
        ),
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
        (
            packed,
            {"cu_seqlens_q": [0, 4, 8]},
            "cu_seqlens_q must end at 9, the length of query, got 8",
        ),
        (
            packed,
            {"cu_seqlens_q": [0, 4, 10]},
            "cu_seqlens_q must end at 9, the length of query, got 10",
        ),
        (
            paged,
            {"cu_seqlens_q": [0, 4, 10]},
            "cu_seqlens_q must end at 9, the length of query, got 10",
        ),
        (
            packed,
            {"cu_seqlens_k": [0, 7, 11]},
            "cu_seqlens_k must end at 12, the length of key, got 11",
        ),
        (
            packed,
            {"cu_seqlens_k": [0, 7, 13]},
            "cu_seqlens_k must end at 12, the length of key, got 13",
        ),
        (
            packed,
            {"cu_seqlens_q": [0], "cu_seqlens_k": [0]},
            "cu_seqlens_q must end at 9, the length of query, got 0",
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
            "cu_seqlens_k must give sequence 1 at most 12 keys, as many as block_table holds, got "
            "13",
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
                f"max_seqlen_q must be at least 5, the length of the longest sequence, got {value}",
            )
            for make in (packed, paged)
            for value in (4, 0, -1)
        ),
        *(
            (
                make,
                {"max_seqlen_k": 6},
                "max_seqlen_k must be at least 7, the length of the longest sequence, got 6",
            )
            for make in (packed, paged)
        ),
        (
            packed,
            {"seqused_k": [3, 5], "max_seqlen_k": 4},
            "max_seqlen_k must be at least 5, the length of the longest sequence, got 4",
        ),
    ],
)
def test_varlen_values(make, replaced, message, device):
    """These values are in the tensors' memory: only the operator itself can check them."""
    with raises(ValueError, f"attention_varlen: {message}"):
        varlen(make(device, **replaced))


REFUSED = {
    "attention, softcap": lambda device: {
        **dict.fromkeys(("query", "key", "value"), torch.zeros(2, 4, 5, 8, device=device)),
        "softcap": -1.0,
    },
    "attention, dropout_p": lambda device: {
        **dict.fromkeys(("query", "key", "value"), torch.zeros(2, 4, 5, 8, device=device)),
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
    """The generator's state is unchanged."""
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
