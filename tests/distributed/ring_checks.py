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


def reference(
    query, key, value, bias=None, slopes=None, sinks=None,
    *, is_causal=False, scale=None, window_left=-1, window_right=-1, softcap=0.0,
):  # fmt: skip
    """Compute attention and its logsumexp by the formula."""
    group = query.shape[1] // key.shape[1]
    key, value = (it.repeat_interleave(group, 1) for it in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    queries, keys = scores.shape[-2:]
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -torch.inf)
    elif bias is not None:
        scores = scores + bias
    if slopes is not None:
        scores = scores - slopes[..., None, None] * distance.abs()
    hidden = torch.ones_like(distance, dtype=torch.bool).triu(1) & is_causal
    if window_left >= 0:
        hidden |= distance > window_left
    if window_right >= 0:
        hidden |= distance < -window_right
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[..., None, None].expand(*scores.shape[:3], 1)), -1)
    logsumexp = scores.logsumexp(-1)
    sees = logsumexp > -torch.inf
    weights = scores.masked_fill(~sees.unsqueeze(-1), 0.0).softmax(-1)[..., :keys]
    weights = weights.masked_fill(~sees.unsqueeze(-1), 0.0)
    return weights @ value, logsumexp.where(sees, 0.0)


def own_rows(bias, **layout):
    """Return this process's rows of a bias, or the bias itself if rows share it."""
    return bias if bias.dim() < 2 or bias.shape[-2] == 1 else shard_sequence(bias, -2, **layout)


def whole_gradient(name, gradient, tensor, group, layout):
    """Assemble a gradient: gather the gradients of rows, sum the others."""
    if name == "bias" and tensor.dim() > 1 and tensor.shape[-2] != 1:
        return gather_sequence(gradient, -2, **layout)
    if name in ("bias", "slopes", "sinks"):
        dist.all_reduce(gradient, group=group)
        return gradient
    return gather_sequence(gradient, **layout)


def differentiated(results, tensors, weights):
    leaves = [it for it in tensors.values() if it.is_floating_point()]
    return torch.autograd.grad(results, leaves, weights)


def compare(tensors, tolerance=1e-12, *, is_balanced=False, group=None, added=None, **options):
    """Compare values and gradients with those of the formula.

    Args:
        added: the bias, slopes and sinks.
    """
    layout = {"group": group, "is_balanced": is_balanced}
    given = dict(zip(("query", "key", "value"), tensors)) | (added or {})
    exact = {name: it.detach().cpu() for name, it in given.items()}
    for name, it in exact.items():
        if it.is_floating_point():
            exact[name] = it.double().requires_grad_()
    expected = reference(**exact, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(it.shape, generator=generator, dtype=torch.float64) for it in expected]
    expected += differentiated(expected, exact, weights)

    parts = {}
    for name, it in given.items():
        shard = own_rows if name == "bias" else shard_sequence
        part = it.clone() if name in ("slopes", "sinks") else shard(it, **layout)
        parts[name] = part.detach().requires_grad_(it.is_floating_point())
    names = {"bias": "attn_bias", "slopes": "alibi_slopes"}
    results = ring_attention(
        **{names.get(name, name): it for name, it in parts.items()},
        return_logsumexp=True, **options, **layout,
    )  # fmt: skip
    mine = [shard_sequence(it, **layout).to(its) for it, its in zip(weights, results)]
    gradients = differentiated(results, parts, mine)
    output, logsumexp = (gather_sequence(it, **layout) for it in results)
    actual = [output, logsumexp.where(logsumexp > -torch.inf, 0.0)]
    floating = [name for name, it in given.items() if it.is_floating_point()]
    actual += [
        whole_gradient(name, it, given[name], group, layout)
        for name, it in zip(floating, gradients, strict=True)
    ]
    for whole, theirs in zip(actual, expected, strict=True):
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
        # With four processes, the last ones have no queries or no keys.
        for lengths in ((23, 23), (5, 23), (23, 5), (1, 1), (0, 3)):
            compare(inputs(device, lengths=lengths), is_causal=False)
        for length in (23, 5, 1):
            compare(inputs(device, lengths=(length, length)), is_causal=True)


def windows():
    """Some windows reach only a process's own keys, some no keys, some those far to the left."""
    for device, is_balanced in itertools.product(("cpu", "foo"), (False, True)):
        for left, right in ((5, 0), (0, 0), (-1, 2), (30, -1), (3, 7), (0, 20)):
            window = {"window_left": left, "window_right": right}
            compare(inputs(device), is_balanced=is_balanced, **window)
            compare(inputs(device), is_balanced=is_balanced, is_causal=True, **window)
            for lengths in ((8, 24), (24, 8)):
                # Windows are aligned to the last query and the last key.
                compare(inputs(device, lengths=lengths), is_balanced=is_balanced, **window)
    for lengths in ((23, 23), (5, 23), (23, 5), (1, 1)):
        compare(inputs("cpu", lengths=lengths), window_left=4, window_right=3)


def added_to_scores():
    torch.manual_seed(2)
    size = {"dtype": torch.float64}
    cases = [
        {"slopes": torch.rand(4, **size)},
        {"slopes": torch.rand(2, 4, **size) / 8},
        {"sinks": torch.randn(4, **size)},
        {"sinks": torch.full((2, 4), -torch.inf, **size)},
        {"bias": torch.randn(2, 4, 24, 24, **size)},
        {"bias": torch.randn(24, 24, **size) > 0},
        {"bias": torch.randn(4, 24, 1, **size)},
        {"bias": torch.randn(2, 1, 1, 24, **size)},
        {"bias": torch.randn(24, **size)},
        {"bias": torch.randn((), **size)},
        {
            "bias": torch.randn(24, 24, **size),
            "slopes": torch.rand(4, **size),
            "sinks": torch.randn(2, 4, **size),
        },
    ]
    for device, is_balanced, added in itertools.product(("cpu", "foo"), (False, True), cases):
        for options in (
            {},
            {"is_causal": True, "softcap": 2.0},
            {"window_left": 9, "window_right": 2, "softcap": 1.5, "scale": 0.4},
        ):
            own = {name: it.to(device) for name, it in added.items()}
            compare(inputs(device), is_balanced=is_balanced, added=own, **options)
    # Each part has one key.
    count = dist.get_world_size()
    bias = torch.randn(4, count, count, **size)
    compare(
        inputs("cpu", lengths=(count, count)), added={"bias": bias, "slopes": torch.rand(4, **size)}
    )


def large_scores():
    """A part's gradients follow from the logsumexp of all keys, even a large one."""
    query, key, value = inputs("cpu")
    for is_causal in (False, True):
        compare([query * 1000, key, value], 1e-9, is_causal=is_causal)
    bias = torch.full((24,), -1e9, dtype=torch.float64)
    compare([query, key, value], 1e-5, added={"bias": bias})


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
    """torch's context shards the buffers, balanced or not, and our attention runs in its ring."""
    for device, length, is_causal in itertools.product(("cpu", "foo"), (24, 20), (False, True)):
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        tensors = inputs(device, lengths=(length, length))
        exact = [it.detach().cpu().requires_grad_() for it in tensors]
        sinks, slopes = (torch.rand(4, dtype=torch.float64) for _ in range(2))
        options = {"is_causal": is_causal, "window_left": 15, "softcap": 3.0}
        expected, _ = reference(*exact, slopes=slopes, sinks=sinks, **options)
        options |= {"alibi_slopes": slopes.to(device), "sinks": sinks.to(device)}
        gradients = torch.autograd.grad(expected.square().sum(), exact)
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
            parts = [it.detach().requires_grad_() for it in tensors]
            output = foo_ops.attention(*parts, **options)
            mine = [output, *torch.autograd.grad(output.square().sum(), parts)]
            whole = context_parallel_unshard(mesh, [it.detach() for it in mine], [2] * 4)
        for actual, theirs in zip(whole, [expected, *gradients], strict=True):
            torch.testing.assert_close(actual.cpu(), theirs.detach(), rtol=1e-12, atol=1e-12)
        # Outside the context, attention is again that of one process.
        alone = foo_ops.attention(*tensors, **options)
        torch.testing.assert_close(alone.cpu(), expected.detach(), rtol=1e-12, atol=1e-12)


def refused_in_context_parallel():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    query, key, value = inputs("cpu", lengths=(8, 8))
    starts = torch.tensor([0, 4], dtype=torch.int32)
    with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2] * 3):
        with refuses(
            NotImplementedError,
            "attention: dropout_p must not be given within context_parallel, since "
            "foo_ops.distributed.ring_attention does not support this argument",
        ):
            foo_ops.attention(query, key, value, dropout_p=0.5)
        with refuses(
            NotImplementedError,
            "attention: attn_bias must not be given within context_parallel, since "
            "foo_ops.distributed.ring_attention does not support this argument",
        ):
            foo_ops.attention(query, key, value, torch.zeros(8))
        with refuses(
            NotImplementedError,
            "attention_varlen: packed sequences are not supported within context_parallel; use "
            "foo_ops.attention on dense sequences",
        ):
            foo_ops.attention_varlen(
                *(torch.randn(4, 2, 8) for _ in range(3)), starts, starts,
                max_seqlen_q=4, max_seqlen_k=4,
            )  # fmt: skip


def errors():
    """An error of one process is raised on all, before any communication."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    with refuses(
        ValueError,
        f"ring_attention: key must have head dimension 8 as query has, got 6 (on rank {last})",
    ):
        ring_attention(query, key[..., :6] if rank == last else key, value)
    with refuses(
        ValueError,
        "ring_attention: query must have the same shape on all processes except for the length, "
        f"got [1, 2, 4, 8] on rank 0 and [2, 2, 4, 8] on rank {last}",
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
    for name, mine, theirs in (("window_left", -1, 3), ("softcap", 0.0, 2.0)):
        with refuses(
            ValueError,
            f"ring_attention: {name} must be the same on all processes, got {mine} on rank 0 and "
            f"{theirs} on rank {last}",
        ):
            ring_attention(query, key, value, **{name: theirs if rank == last else mine})
    with refuses(
        ValueError,
        "ring_attention: sinks must have the same shape on all processes, got None on rank 0 and "
        f"[2] on rank {last}",
    ):
        ring_attention(query, key, value, sinks=torch.zeros(2) if rank == last else None)
    with refuses(
        ValueError,
        "ring_attention: alibi_slopes must have shape [Hq] = [2] or [B, Hq] = [1, 2], got [3] "
        f"(on rank {last})",
    ):
        ring_attention(query, key, value, alibi_slopes=torch.zeros(2 + (rank == last)))
    total = 4 * dist.get_world_size()
    with refuses(
        ValueError,
        "ring_attention: attn_bias must have a shape that broadcasts to "
        f"[1, 2, 4, {total}], got [4, 4] (on rank {last})",
    ):
        ring_attention(query, key, value, torch.zeros(4, 4 if rank == last else total))
    with refuses(
        ValueError,
        f"ring_attention: attn_bias must be on cpu as query is, got foo:0 (on rank {last})",
    ):
        ring_attention(
            query, key, value, torch.zeros(4, total, device="foo" if rank == last else "cpu")
        )
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
