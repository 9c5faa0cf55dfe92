"""foo::attention gives the same results however its work is divided."""

import math

import pytest
import torch
from support.exact import assert_near

from foo_ops import testing
from foo_ops.testing import ATTENTION
from foo_ops.testing.specs.attention import attention_sample, random_bias, random_slopes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_halves_of_the_keys_merge_by_their_logsumexp(dtype, device):
    sample = attention_sample(queries=5, keys=131)(dtype)
    query, key, value, *_ = sample.to(device).inputs
    parts = [
        torch.ops.foo.attention(query, key[:, :, keys], value[:, :, keys])
        for keys in (slice(0, 70), slice(70, 131))
    ]
    sums = torch.stack([part[1] for part in parts])
    merged = sum(part[0] * torch.exp(part[1] - sums.logsumexp(0)).unsqueeze(-1) for part in parts)
    output, logsumexp = sample.exact().call(ATTENTION.reference)
    assert_near(merged, output)
    assert_near(sums.logsumexp(0), logsumexp)


@pytest.mark.parametrize("queries", [9, 64, 77])
@pytest.mark.parametrize("dtype", ATTENTION.dtypes, ids=str)
def test_blocks_of_queries_whose_keys_are_split(dtype, queries, device):
    """Keys are split, since there are too few blocks of queries for many threads."""
    make = attention_sample(
        batch=1, heads=2, queries=queries, keys=2100, head_dim=64, value_dim=56, window_right=0
    )
    sample = make(dtype).to(device)
    testing.check_outputs(ATTENTION, sample, dtype, sample.call(ATTENTION.operator))


@pytest.mark.parametrize("window_left", [-1, 20])
@pytest.mark.parametrize(("keys", "value_dim"), [(160, 48), (160, 40), (170, 48)])
@pytest.mark.parametrize("dtype", ATTENTION.dtypes, ids=str)
def test_sums_of_keys_may_be_gathered_in_the_gradients(dtype, keys, value_dim, window_left, device):
    """Sums lie in the gradients if whole-row products end with the keys, one sum for each head."""
    make = attention_sample(
        batch=3,
        heads=6,
        key_heads=3,
        queries=keys,
        keys=keys,
        head_dim=32,
        value_dim=value_dim,
        window_left=window_left,
    )
    sample = make(dtype).to(device).requiring_grad()
    outputs = sample.call(ATTENTION.operator)
    cotangents = testing.cotangents_for(outputs)
    gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
    testing.check_gradients(ATTENTION, sample, gradients, cotangents)


FEW = {"batch": 1, "heads": 1}


@pytest.mark.parametrize(
    "make",
    [
        attention_sample(**FEW, queries=1, keys=5000),
        attention_sample(batch=1, heads=8, key_heads=2, queries=1, keys=1500, window_right=0),
        attention_sample(**FEW, queries=3, keys=1030, bias=random_bias(1, 1030)),
        attention_sample(**FEW, queries=500, keys=500, is_causal=True),
        attention_sample(**FEW, queries=700, keys=20, bias=random_bias()),
        attention_sample(batch=3, heads=4, queries=300, keys=70, bias=random_bias(300, 70)),
        attention_sample(batch=2, heads=8, queries=150, keys=300),
        attention_sample(batch=2, heads=8, queries=300, keys=300, is_causal=True),
        attention_sample(
            **FEW, queries=300, keys=400, sinks=random_bias(1), slopes=random_slopes(1)
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_bits_however_the_work_is_cut(make, dtype, device):
    """Threads share one head's queries or keys if there is little else to do, or many heads."""
    sample = make(dtype).to(device).requiring_grad()
    results = []
    for threads in (1, 2, 3, 3, 1):
        torch.set_num_threads(threads)
        outputs = sample.call(ATTENTION.operator)
        cotangents = testing.cotangents_for(outputs)
        gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
        results.append((*outputs, *gradients))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def some_are(number, argument):
    """Return a change of query (0), key or value: ``number`` in row 230 of the first head."""

    def change(sample):
        # As a tensor: torch 2.15 refuses Python numbers that overflow float16.
        sample.inputs[argument][0, 0, 230] = torch.tensor(number)
        return sample

    return change


@pytest.mark.parametrize(
    ("threads", "shape", "options", "change"),
    [
        (2, {"heads": 2, "queries": 640, "keys": 700}, {}, None),
        (2, {"heads": 2, "queries": 640, "keys": 700}, {"is_causal": True}, None),
        (2, {"heads": 2, "queries": 640, "keys": 700}, {"window_right": 0}, None),
        (2, {"heads": 2, "queries": 640, "keys": 700}, {"window_left": 300}, None),
        (2, {"heads": 2, "queries": 640, "keys": 640}, {"dropout_p": 0.3}, None),
        (2, {"heads": 2, "queries": 640, "keys": 640}, {}, some_are(math.nan, 0)),
        (2, {"heads": 2, "queries": 640, "keys": 640}, {}, some_are(2.0**33, 0)),
        (2, {"heads": 2, "queries": 640, "keys": 640}, {"is_causal": True}, some_are(math.inf, 1)),
        (2, {"heads": 2, "queries": 640, "keys": 640}, {"is_causal": True}, some_are(math.inf, 2)),
        # Sizes that would move the ends of tiles and panels, with a number that shows it.
        (2, {"heads": 2, "queries": 640, "keys": 700}, {"window_right": 0}, some_are(math.inf, 2)),
        (2, {"heads": 2, "queries": 700, "keys": 700}, {}, some_are(math.nan, 0)),
        # The remainder goes to the kernel for few queries.
        (2, {"heads": 68, "key_heads": 4, "queries": 8, "keys": 333}, {}, None),
        (3, {"heads": 1, "queries": 2689, "keys": 77}, {}, None),
        # Split keys, and blocks that merge the same key splits.
        (5, {"heads": 1, "queries": 1280, "keys": 2300}, {}, None),
        (5, {"heads": 1, "queries": 1300, "keys": 2300}, {"window_right": 0}, None),
        (
            5,
            {"heads": 2, "queries": 1281, "keys": 2300},
            {"window_left": 2100},
            some_are(math.nan, 0),
        ),
        (3, {"heads": 1, "queries": 2560, "keys": 2560}, {"is_causal": True}, None),
        # Blocks whose key splits end at different keys.
        (16, {"heads": 1, "queries": 4096, "keys": 4096}, {"is_causal": True}, None),
        (16, {"heads": 1, "queries": 3072, "keys": 16384}, {"window_left": 8000}, None),
        # More than 64 blocks of 128 queries but fewer of 256, so that keys might be split.
        (13, {"heads": 10, "queries": 1280, "keys": 1300}, {}, None),
        (16, {"heads": 12, "queries": 1100, "keys": 1100}, {}, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_bits_whether_or_not_blocks_are_merged(threads, shape, options, change, dtype):
    sample = attention_sample(batch=1, **shape)(dtype)
    if change is not None:
        sample = change(sample)
    query, key, value, *others = sample.inputs
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        outputs = torch.ops.foo.attention(query, key, value, *others, **options)
        results.append([output.contiguous().view(torch.uint8) for output in outputs])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_that_see_nothing_are_zero_whatever_was_computed_before(dtype):
    """Kernels reuse a thread's memory from call to call."""
    torch.set_num_threads(1)
    query, key = torch.randn(1, 1, 128, 64, dtype=dtype), torch.randn(1, 1, 30, 64, dtype=dtype)
    torch.ops.foo.attention(*torch.full((3, 1, 1, 128, 64), math.nan, dtype=dtype))
    output, _ = torch.ops.foo.attention(query, key, key, window_right=0)
    assert torch.equal(output[:, :, :98], torch.zeros(1, 1, 98, 64, dtype=dtype))
    assert output.isfinite().all()
