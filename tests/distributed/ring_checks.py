"""Checks that test_ring_attention.py runs on several processes."""

import itertools

import torch
import torch.distributed as dist
from support.ranks import refuses, run_checks
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

import foo_ops
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


def in_context_parallel():
    """torch's context cuts the buffers, balanced or not, and our attention goes round its ring."""
    for device, length, is_causal in itertools.product(("cpu", "foo"), (24, 20), (False, True)):
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        tensors = inputs(device, lengths=(length, length))
        exact = [it.detach().cpu().requires_grad_() for it in tensors]
        expected, _ = reference(*exact, is_causal=is_causal, scale=None)
        gradients = torch.autograd.grad(expected.square().sum(), exact)
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
            parts = [it.detach().requires_grad_() for it in tensors]
            output = foo_ops.attention(*parts, is_causal=is_causal)
            mine = [output, *torch.autograd.grad(output.square().sum(), parts)]
            whole = context_parallel_unshard(mesh, [it.detach() for it in mine], [2] * 4)
        for actual, theirs in zip(whole, [expected, *gradients], strict=True):
            torch.testing.assert_close(actual.cpu(), theirs.detach(), rtol=1e-12, atol=1e-12)
        # Outside, attention is that of one process again.
        alone = foo_ops.attention(*tensors, is_causal=is_causal)
        torch.testing.assert_close(alone.cpu(), expected.detach(), rtol=1e-12, atol=1e-12)


def refused_in_context_parallel():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    query, key, value = inputs("cpu", lengths=(8, 8))
    starts = torch.tensor([0, 4], dtype=torch.int32)
    with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2] * 3):
        with refuses(
            NotImplementedError,
            "attention: softcap must not be given within context_parallel, where "
            "foo_ops.distributed.ring_attention is called, which takes is_causal and scale",
        ):
            foo_ops.attention(query, key, value, softcap=2.0)
        with refuses(
            NotImplementedError,
            "attention: sinks must not be given within context_parallel, where "
            "foo_ops.distributed.ring_attention is called, which takes is_causal and scale",
        ):
            foo_ops.attention(query, key, value, sinks=torch.zeros(4))
        with refuses(
            NotImplementedError,
            "attention_varlen: context_parallel must not cut packed sequences; "
            "foo_ops.distributed.ring_attention takes dense ones",
        ):
            foo_ops.attention_varlen(
                *(torch.randn(4, 2, 8) for _ in range(3)), starts, starts,
                max_seqlen_q=4, max_seqlen_k=4,
            )  # fmt: skip


def errors():
    """What is wrong on one process is raised on all, before anything goes round."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    with refuses(
        ValueError,
        f"ring_attention: key must have head dimension 8 as query has, got 6 (on rank {last})",
    ):
        ring_attention(query, key[..., :6] if rank == last else key, value)
    with refuses(
        ValueError,
        "ring_attention: query must have the same shape on all processes but for its length, got "
        f"[1, 2, 4, 8] on rank 0 and [2, 2, 4, 8] on rank {last}",
    ):
        ring_attention(*(it.expand(1 + (rank == last), -1, -1, -1) for it in (query, key, value)))
    with refuses(
        TypeError,
        "ring_attention: query must have the same dtype on all processes, got float32 on rank 0 "
        f"and float64 on rank {last}",
    ):
        ring_attention(*(it.double() if rank == last else it for it in (query, key, value)))
    with refuses(
        ValueError,
        "ring_attention: scale must be the same on all processes, got None on rank 0 and 2.0 on "
        f"rank {last}",
    ):
        ring_attention(query, key, value, scale=2.0 if rank == last else None)
    with refuses(
        ValueError,
        "ring_attention: key must have length 4 as query has if is_causal, got 3 (on rank 0)",
    ):
        ring_attention(query, key[:, :, :3], value[:, :, :3], is_causal=True)
    with refuses(
        ValueError,
        "ring_attention: query must have an even length if is_balanced, got 3 (on rank 0)",
    ):
        ring_attention(
            *(it[:, :, :3] for it in (query, key, value)), is_causal=True, is_balanced=True
        )
    size = 2 * dist.get_world_size()
    with refuses(
        ValueError,
        f"shard_sequence: tensor must have a multiple of {size} elements in dimension 2 if "
        "is_balanced, got 3",
    ):
        shard_sequence(query[:, :, :3], is_balanced=True)


if __name__ == "__main__":
    run_checks(globals())
