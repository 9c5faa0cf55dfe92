"""Checks that test_ring_attention.py runs on several processes."""

import itertools

import torch
import torch.distributed as dist
from support.ranks import run_checks

from foo_ops.distributed import gather_sequence, ring_attention, shard_sequence


def inputs(device, heads=4, key_heads=2, lengths=(24, 24), dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [
        (2, heads, lengths[0], 8),
        (2, key_heads, lengths[1], 8),
        (2, key_heads, lengths[1], 5),
    ]
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]


def reference(query, key, value, *, is_causal, scale):
    """Compute attention and its logsumexp by the formula."""
    group = query.shape[1] // key.shape[1]
    key, value = (it.repeat_interleave(group, 1) for it in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def compare(tensors, tolerance=1e-12, *, is_causal, scale=None, is_balanced=False, group=None):
    layout = {"group": group, "is_balanced": is_balanced}
    exact = [it.detach().cpu().double().requires_grad_() for it in tensors]
    expected = reference(*exact, is_causal=is_causal, scale=scale)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(it.shape, generator=generator, dtype=torch.float64) for it in expected]
    expected += torch.autograd.grad(expected, exact, weights)

    parts = [shard_sequence(it, **layout).requires_grad_() for it in tensors]
    results = ring_attention(
        *parts, is_causal=is_causal, scale=scale, return_logsumexp=True, **layout
    )
    mine = [shard_sequence(it, **layout).to(its) for it, its in zip(weights, results)]
    results += torch.autograd.grad(results, parts, mine)
    for actual, theirs in zip(results, expected, strict=True):
        whole = gather_sequence(actual, **layout)
        assert whole.device == tensors[0].device
        torch.testing.assert_close(
            whole.cpu().double(), theirs.detach(), rtol=tolerance, atol=tolerance
        )


def values_and_gradients():
    for device, is_causal, is_balanced in itertools.product(
        ("cpu", "foo"), (False, True), (False, True)
    ):
        for heads, key_heads in ((4, 4), (4, 2), (3, 1)):
            tensors = inputs(device, heads, key_heads)
            compare(tensors, is_causal=is_causal, is_balanced=is_balanced)
        compare(inputs(device), is_causal=is_causal, is_balanced=is_balanced, scale=0.7)


def lengths_that_differ():
    for device in ("cpu", "foo"):
        # The last processes of four have no queries, or no keys.
        for lengths in ((23, 23), (5, 23), (23, 5), (1, 1), (0, 3)):
            compare(inputs(device, lengths=lengths), is_causal=False)
        for length in (23, 5, 1):
            compare(inputs(device, lengths=(length, length)), is_causal=True)


def half_precision():
    for dtype, tolerance in (
        (torch.bfloat16, 2**-5),
        (torch.float16, 2**-8),
        (torch.float32, 1e-5),
    ):
        compare(inputs("cpu", dtype=dtype), tolerance, is_causal=True, is_balanced=True)


def part_of_the_processes():
    groups = [dist.new_group([1, 0]), dist.new_group([dist.get_world_size() - 1])]
    for group in groups:
        if dist.get_rank(group) >= 0:
            compare(inputs("cpu"), is_causal=True, group=group)


if __name__ == "__main__":
    run_checks(globals())
