"""foo::attention and its gradients are the same, bit for bit, for every number of threads."""

import pytest
import torch

from foo_ops.testing.checks.matrix import threads

# Batch, query heads, key heads, queries, keys: threads join heads that others have begun, blocks in
# chunks, and blocks whose keys are split, also with one chunk.
SIZES = [
    (1, 16, 16, 300, 300),
    (1, 1, 1, 1300, 1300),
    (2, 8, 2, 300, 700),
    (1, 3, 3, 700, 1500),
    (1, 8, 8, 100, 3000),
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
