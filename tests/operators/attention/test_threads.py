"""foo::attention and its gradients are the same, bit for bit, for every number of threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.exact import assert_near

import foo_ops
from foo_ops.testing.checks.matrix import threads

# With more than 256 tiles of 128 x 128 and few blocks, the backward pass splits keys.
SPLIT = [(1, 1, 1, 2200, 2200), (1, 4, 2, 600, 2000)]
# Batch, query heads, key heads, queries, keys: threads join heads that others have begun, blocks in
# chunks, and blocks whose keys are split, also with one chunk.
SIZES = [
    (1, 16, 16, 300, 300),
    (1, 1, 1, 1300, 1300),
    (2, 8, 2, 300, 700),
    (1, 3, 3, 700, 1500),
    (1, 8, 8, 100, 3000),
    *SPLIT,
]
OPTIONS = [{}, {"is_causal": True}, {"window_left": 200, "window_right": 0}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_do_not_depend_on_threads(sizes, options, dtype):
    batch, heads, key_heads, queries, keys = sizes
    generator = torch.Generator().manual_seed(queries)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    query = random(batch, heads, queries, 40).requires_grad_()
    key = random(batch, key_heads, keys, 40).requires_grad_()
    value = random(batch, key_heads, keys, 32).requires_grad_()
    cotangent = random(batch, heads, queries, 32)

    def results(count):
        with threads(count):
            output, logsumexp = torch.ops.foo.attention(query, key, value, **options)
            gradients = torch.autograd.grad(output, (query, key, value), cotangent)
        return output, logsumexp, *gradients

    expected = results(1)
    for count in (2, 5, 16):
        assert all(torch.equal(*pair) for pair in zip(results(count), expected, strict=True)), count


CALLS = [
    ((2, 4, 2, 1, 900), {}, 1),
    ((2, 4, 2, 1, 901), {}, 1),
    ((2, 4, 2, 1, 901), {"window_left": 30}, 1),
    ((2, 4, 2, 1, 901), {"window_left": 30, "window_right": 2}, 1),
    ((1, 4, 2, 1, 901), {}, 1),
    ((1, 4, 4, 1, 901), {}, 1),
    ((1, 4, 4, 1, 901), {}, 2),
    ((1, 4, 4, 70, 901), {}, 2),
    ((1, 4, 4, 70, 901), {"is_causal": True}, 2),
    ((1, 4, 4, 70, 901), {"is_causal": True, "softcap": 5.0}, 2),
    ((40, 16, 16, 1, 20), {}, 1),
]
"""Sizes, options and threads of calls that differ in little from the one before."""


def test_calls_one_after_the_other():
    """A call may run the loops of the one before only if it is alike."""

    def result(sizes, options, count):
        batch, heads, key_heads, queries, keys = sizes
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(batch, heads, queries, 24, generator=generator)
        key, value = torch.randn(2, batch, key_heads, keys, 24, generator=generator)
        with threads(count):
            return torch.ops.foo.attention(query, key, value, **options)[0]

    def alone(*call):
        # A thread that has made no other call.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(result, *call).result()

    expected = [alone(*it) for it in CALLS]
    for order in (range(len(CALLS)), reversed(range(len(CALLS)))):
        for place in order:
            for _ in range(2):
                assert torch.equal(result(*CALLS[place]), expected[place]), CALLS[place]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", SPLIT, ids=str)
def test_gradients_of_split_keys(sizes, is_causal, dtype):
    _, heads, key_heads, queries, keys = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, queries, 40), (1, key_heads, keys, 40), (1, key_heads, keys, 32)]
    tensors = [torch.randn(it, generator=generator).to(dtype).requires_grad_() for it in shapes]
    exact = [it.detach().double().requires_grad_() for it in tensors]
    query, key, value = exact
    scores = query @ key.repeat_interleave(heads // key_heads, 1).mT / 40**0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(queries, keys).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(heads // key_heads, 1)
    found = foo_ops.attention(*tensors, is_causal=is_causal)
    cotangent = torch.randn(found.shape, generator=generator).to(dtype)
    gradients = torch.autograd.grad(found, tensors, cotangent)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, exact, cotangent.double())):
        assert_near(ours, theirs, roundings=64)
