"""Captured tensors: every dtype, number of dimensions and layout, and indices of every kind."""

import functools

import pytest
import torch
from support.attention_errors import raises
from support.flex_exact import Tensors, assert_results, cotangents_of, exact_of, qkv, results_of
from support.flex_programs import Writer, scores_of
from support.parts import whole

import foo_ops
from foo_ops.kernels.flex.program import DTYPES, INTEGERS
from foo_ops.ops.flex_attention.trace import trace

SIZES = BATCH, HEADS, QUERIES, KEYS = 2, 3, 37, 41


# `make test` has only these, since each dtype compiles a program.
DAILY = ("bool", "int64", "float32", "bfloat16")


@pytest.mark.parametrize("dimensions", [0, 2, 5, *whole(1, 3, 4)])
@pytest.mark.parametrize("dtype", [*DAILY, *whole(*(it for it in DTYPES if it not in DAILY))])
def test_dtypes_and_dimensions(dtype, dimensions, device):
    """Each score is the element at its own batch, head, query and key, and a constant place.

    Indices are integers of any width.
    """
    kind = getattr(torch, dtype)
    shape = (*SIZES, 2)[:dimensions]
    values = torch.randint(0, 2 if dtype == "bool" else 100, shape).to(kind)
    writer = Writer()
    names = ("batch", "head", "query", "key")
    indices = [writer.cast(writer.input(it), kind) for it, kind in zip(names, INTEGERS)]
    indices = [*indices, writer.integer(1, "int64")][:dimensions]
    value = writer.load(dtype, 0, *indices)
    if dtype in ("float16", "bfloat16"):
        value = writer.cast(value, "float32")
    output = writer.cast(value, "float64")
    scores = [torch.zeros(BATCH * HEADS * count) for count in SIZES[2:]]
    found = scores_of(writer, output, SIZES, *scores, [values.to(device)], torch.float64, device)
    places = torch.meshgrid(*map(torch.arange, SIZES[:3]), indexing="ij")
    places = (*places, places[2] % KEYS, torch.ones_like(places[0]))
    expected = values[places[:dimensions]].double().expand(SIZES[:3])
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


LAYOUTS = {
    "contiguous": lambda table: table,
    "transposed": lambda table: table.mT.contiguous().mT,
    "every second": lambda table: table.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda table: table[..., :1].expand_as(table),
    "behind an offset": lambda table: torch.cat((table, table), -1)[..., table.shape[-1] :],
}

# Ways to index a table of (HEADS, QUERIES + KEYS): rising, falling, in steps, the same for all.
INDEXINGS = {
    "rising": lambda table, h, q, k: table[h, q],
    "rising by the key": lambda table, h, q, k: table[h, k],
    "rising over both": lambda table, h, q, k: table[h, q + k],
    "falling": lambda table, h, q, k: table[h, KEYS - 1 - q],
    "falling over both": lambda table, h, q, k: table[h, k - q + QUERIES],
    "negative": lambda table, h, q, k: table[h, q - k],
    "negative alone": lambda table, h, q, k: table[h - HEADS, -1 - q],
    "halves": lambda table, h, q, k: table[h, q // 2],
    "every second": lambda table, h, q, k: table[h, 2 * q],
    "scattered": lambda table, h, q, k: table[h, (q * 13 + k * 7) % (QUERIES + KEYS)],
    "lanes before the last": lambda table, h, q, k: table[q % HEADS, k],
    "both": lambda table, h, q, k: table[q % HEADS, (k + q) % KEYS],
    "one element": lambda table, h, q, k: table[1, 5],
    "of the head": lambda table, h, q, k: table[h, 3],
    "long indices": lambda table, h, q, k: table[h.long(), k.long()],
}


def check(index, layout, dtype, device, captured=None):
    """Compare with float64; each score is a table's element, with the table in a given layout."""
    captured = captured or dtype
    ours, exact = Tensors(device, captured), Tensors("cpu", torch.float64, captured)
    tables = [it.new(HEADS, QUERIES + KEYS) for it in (ours, exact)]
    functions = []
    for table in map(layout, tables):
        functions.append(lambda score, b, h, q, k, table=table: score * index(table, h, q, k) + b)
    inputs = qkv(SIZES, dtype, device)
    cotangents = cotangents_of(inputs[0], inputs[2], dtype)
    function = functools.partial(foo_ops.flex_attention, score_mod=functions[0], return_lse=True)
    results = results_of(function, inputs, ours.made, cotangents)
    expected = exact_of(inputs, exact.made, cotangents, functions[1])
    assert_results(results, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *whole(torch.float64)], ids=str)
@pytest.mark.parametrize("name", INDEXINGS)
def test_indices(name, dtype, device):
    check(INDEXINGS[name], LAYOUTS["contiguous"], dtype, device)


@pytest.mark.parametrize("name", ["rising", "falling over both", "scattered"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, name, device):
    check(INDEXINGS[name], LAYOUTS[layout], torch.float32, device)


@pytest.mark.parametrize("captured", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_table_of_another_dtype(captured, device):
    check(INDEXINGS["negative"], LAYOUTS["contiguous"], torch.float32, device, captured)


OUTSIDE = {
    "above": lambda table, h, q, k: table[h, q + k + 2],
    "below": lambda table, h, q, k: table[h, q - k - QUERIES - KEYS],
    "one query": lambda table, h, q, k: table[h, torch.where(q == QUERIES - 1, 10**6, 0)],
    "one key": lambda table, h, q, k: table[h, torch.where(k == 3, -(10**6), 0)],
    "a head": lambda table, h, q, k: table[h + 1, k],
    "far beyond 32 bits": lambda table, h, q, k: table[h, k.long() * 2**40],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside(name, device):
    table = torch.zeros(HEADS, QUERIES + KEYS - 1, device=device)
    other = torch.zeros(1, device=device)

    def score_mod(score, b, h, q, k):
        return score + other[0] + OUTSIDE[name](table, h, q, k)

    inputs = [it.detach() for it in qkv(SIZES, torch.float32, device)]
    (number,) = (
        at for at, it in enumerate(trace(score_mod, None, inputs[0]).captured) if it is table
    )
    with raises(IndexError, message(number)):
        foo_ops.flex_attention(*inputs, score_mod)
    with raises(IndexError, message(0)):
        foo_ops.flex_attention(
            *inputs, block_mask=lambda b, h, q, k: OUTSIDE[name](table, h, q, k) == 0
        )


def message(number):
    return (
        f"flex_attention: score_mod and mask_mod must index captured tensor {number} within its "
        f"shape [{HEADS}, {QUERIES + KEYS - 1}]"
    )


@pytest.mark.parametrize(
    "index", [lambda q, k: q + k, lambda q, k: -1 - q - k], ids=["from the first", "from the last"]
)
def test_the_last_elements_are_inside(index, device):
    table = torch.ones(HEADS, QUERIES + KEYS - 1, device=device)
    inputs = [it.detach() for it in qkv(SIZES, torch.float32, device)]
    foo_ops.flex_attention(*inputs, lambda score, b, h, q, k: score + table[h - HEADS, index(q, k)])


def test_gradients_that_are_not_required_are_not_computed(device):
    """Flags select a program's gradients; unselected gradients are empty."""
    inputs = [it.detach() for it in qkv(SIZES, torch.float32, device)]
    tables = Tensors(device, torch.float32)
    first, second = tables.new(HEADS, KEYS), tables.new(QUERIES)
    traced = trace(lambda s, b, h, q, k: s * first[h, k] + second[q], None, inputs[0])
    options = {"numbers": traced.numbers, "integers": traced.integers}
    captured = [it.detach() for it in traced.captured]
    results = torch.ops.foo.flex_attention(*inputs, captured, score_mod=traced.score_mod, **options)
    cotangents = cotangents_of(inputs[0], inputs[2], torch.float32)

    def gradients(*flags):
        found = torch.ops.foo.flex_attention_backward(
            *cotangents, *inputs, captured, *results, captured_requires_grad=flags,
            score_mod=traced.score_mod, backward=traced.backward, **options,
        )  # fmt: skip
        return [*found[:3], *found[3]]

    expected = gradients(True, True)
    for flags in ((True, False), (False, True), (False, False)):
        found = gradients(*flags)
        kept = [True, True, True, *flags]
        for result, value, is_kept in zip(found, expected, kept, strict=True):
            assert torch.equal(result, value) if is_kept else result.numel() == 0
