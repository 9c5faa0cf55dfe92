"""Checks that test_sharding.py runs on several processes: operators on DTensors."""

import functools

import torch
import torch.distributed as dist
from support import sharded_operators as kit
from support.ranks import refuses, run_checks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_leaves

import foo_ops
from foo_ops.ops import dequantize


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def placed(tensor, mesh, placements):
    """Distribute a tensor; the parts of Partial differ."""
    placements = [
        it if not isinstance(it, Shard) or it.dim < tensor.dim() else Replicate()
        for it in placements
    ]
    if list(placements) != [Partial()]:
        return distribute_tensor(tensor, mesh, placements)
    part = tensor * 3 if mesh.get_local_rank() == 0 else -2 * tensor / (mesh.size() - 1)
    return DTensor.from_local(part, mesh, placements, run_check=False)


def differentiated(function, tensors):
    """Return the results of a function and the gradients of its floating-point arguments."""
    tensors = [it.detach().requires_grad_(it.is_floating_point()) for it in tensors]
    results = [it for it in tree_leaves(function(*tensors)) if it.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for result in results:
        weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        weights = weights.to(result.device)
        if isinstance(result, DTensor):
            mesh = result.device_mesh
            weights = distribute_tensor(weights, mesh, [Replicate()] * mesh.ndim)
        loss = loss + (result * weights).sum()
    leaves = [it for it in tensors if it.is_floating_point()]
    return results, torch.autograd.grad(loss, leaves)


def whole(tensors):
    return [it.full_tensor() if isinstance(it, DTensor) else it for it in tensors]


def assert_as_one_process(function, tensors, mesh, placements):
    """Compare results and gradients with those of one process."""
    expected = differentiated(function, tensors)
    distributed = [placed(it, mesh, where) for it, where in zip(tensors, placements, strict=True)]
    results, gradients = differentiated(function, distributed)
    assert all(isinstance(it, DTensor) for it in (*results, *gradients))
    for mine, theirs in zip((results, gradients), expected, strict=True):
        torch.testing.assert_close(
            whole(mine), list(theirs), rtol=1e-11, atol=1e-11, equal_nan=True
        )
    return results


def all_placements(tensors):
    """Yield placements for all tensors: all equal, and then each tensor placed alone."""
    most = max(it.dim() for it in tensors)
    ways = [Replicate(), *map(Shard, range(most))]
    for way in ways:
        yield [[way]] * len(tensors)
    for place, tensor in enumerate(tensors):
        own = [*map(Shard, range(tensor.dim()))]
        if tensor.is_floating_point():
            own.append(Partial())
        for way in own:
            yield [[way if place == it else Replicate()] for it in range(len(tensors))]


def elementwise():
    return {
        "abs": (foo_ops.abs, [randn(4, 6)]),
        "abs of few": (foo_ops.abs, [randn(1, 3)]),
        "silu_mul": (foo_ops.silu_mul, [randn(4, 6, 3), randn(4, 6, 3)]),
        "silu_mul, broadcast": (foo_ops.silu_mul, [randn(6, 1, 5), randn(4, 5)]),
    }


def rows():
    tables = [randn(6, 2), randn(6, 2)]
    logits, target = randn(4, 6, 10), torch.randint(10, (4, 6))
    target[0, :3] = -100
    cases = {
        "rms_norm": (foo_ops.rms_norm, [randn(4, 6, 8), randn(8)]),
        "rms_norm without weight": (foo_ops.rms_norm, [randn(5, 8)]),
        "add_rms_norm": (foo_ops.add_rms_norm, [randn(4, 6, 8), randn(4, 6, 8), randn(8)]),
        "rms_norm of many rows": (foo_ops.rms_norm, [randn(150, 3), randn(3)]),
        "layer_norm": (foo_ops.layer_norm, [randn(4, 6, 8), randn(8), randn(8)]),
        "add_layer_norm": (foo_ops.add_layer_norm, [randn(5, 8), randn(5, 8), randn(8)]),
        "rotary_embedding": (foo_ops.rotary_embedding, [randn(4, 2, 6, 4), *tables]),
        "rotary_embedding of rows": (
            foo_ops.rotary_embedding,
            [randn(4, 6, 4), randn(4, 1, 2), randn(4, 1, 2)],
        ),
    }
    for reduction in ("mean", "sum", "none"):
        cases[f"softmax_cross_entropy, {reduction}"] = (
            functools.partial(
                foo_ops.softmax_cross_entropy,
                reduction=reduction,
                label_smoothing=0.1,
                return_logsumexp=True,
            ),
            [logits, target],
        )
        cases[f"linear_cross_entropy, {reduction}"] = (
            functools.partial(
                foo_ops.linear_cross_entropy,
                reduction=reduction,
                label_smoothing=0.1,
                return_logsumexp=True,
            ),
            [randn(4, 6, 5), randn(10, 5), target, randn(10)],
        )
    return cases


def experts():
    index = torch.tensor([[0, 2], [1, 0], [2, 3], [0, 1], [2, 0], [3, 1]])
    weights = [randn(6, 2), randn(3, 8, 6), randn(3, 6, 4), randn(3, 8), randn(3, 6)]
    return {
        "moe_experts": (foo_ops.moe_experts, [randn(6, 6), index, *weights]),
        "moe_experts without bias": (foo_ops.moe_experts, [randn(6, 6), index, *weights[:3]]),
        "grouped_linear": (
            foo_ops.grouped_linear,
            [randn(7, 6), randn(3, 4, 6), torch.tensor([2, 2, 6]), randn(3, 4)],
        ),
        "grouped_linear without bias": (
            foo_ops.grouped_linear,
            [randn(7, 6), randn(3, 4, 6), torch.tensor([2, 2, 6])],
        ),
    }


def products():
    int8 = foo_ops.quantize_weight(randn(10, 8), 8)
    of_groups = foo_ops.quantize_weight(randn(10, 128), 8, group_size=32)
    int4 = foo_ops.quantize_weight(randn(10, 128), 4, group_size=32)
    mxfp4 = foo_ops.quantize_mxfp4(randn(10, 128))
    codes = randn(10, 128).to(torch.float8_e4m3fn).view(torch.uint8)
    of_rows, of_blocks = randn(10), randn(10, 4)
    table4 = (mxfp4[0], of_blocks, randn(16))
    linear_int4 = functools.partial(foo_ops.linear_int4, group_size=32)
    numbers_of_fp8 = functools.partial(dequantize.numbers_of_fp8, dtype=torch.float64)
    numbers_of_table4 = functools.partial(dequantize.numbers_of_table4, dtype=torch.float64)
    return {
        "linear": (foo_ops.linear, [randn(4, 6, 8), randn(10, 8), randn(10)]),
        "linear without bias": (foo_ops.linear, [randn(4, 6, 8), randn(10, 8)]),
        "linear_int8": (foo_ops.linear_int8, [randn(4, 6, 8), *int8, randn(10)]),
        "linear_int8 without bias": (foo_ops.linear_int8, [randn(4, 6, 8), *int8]),
        "linear_int8 of groups": (foo_ops.linear_int8, [randn(4, 6, 128), *of_groups, randn(10)]),
        "linear_int8 of groups without bias": (
            foo_ops.linear_int8,
            [randn(4, 6, 128), *of_groups],
        ),
        "linear_fp8": (foo_ops.linear_fp8, [randn(4, 6, 128), codes, of_blocks, randn(10)]),
        "linear_fp8 without bias": (foo_ops.linear_fp8, [randn(4, 6, 128), codes, of_rows]),
        "linear_fp8 of groups without bias": (
            foo_ops.linear_fp8,
            [randn(4, 6, 128), codes, of_blocks],
        ),
        "linear_int4": (linear_int4, [randn(4, 6, 128), *int4, randn(10)]),
        "linear_int4 without bias": (linear_int4, [randn(4, 6, 128), *int4]),
        "linear_mxfp4": (foo_ops.linear_mxfp4, [randn(4, 6, 128), *mxfp4, randn(10)]),
        "linear_mxfp4 without bias": (foo_ops.linear_mxfp4, [randn(4, 6, 128), *mxfp4]),
        "linear_table4": (foo_ops.linear_table4, [randn(4, 6, 128), *table4, randn(10)]),
        "linear_table4 without bias": (foo_ops.linear_table4, [randn(4, 6, 128), *table4]),
        "linear_silu_mul_quantized": (
            foo_ops.linear_silu_mul_quantized,
            [randn(4, 6, 8), *int8],
        ),
        "linear_silu_mul_quantized of groups": (
            foo_ops.linear_silu_mul_quantized,
            [randn(4, 6, 128), *of_groups],
        ),
        "linear_silu_mul_quantized of 4 bits": (
            foo_ops.linear_silu_mul_quantized,
            [randn(4, 6, 128), *int4],
        ),
        "dequantize_int8": (dequantize.numbers_of_integers, [*int8]),
        "dequantize_int8 of groups": (dequantize.numbers_of_integers, [*of_groups]),
        "dequantize_int4": (dequantize.numbers_of_integers, [*int4]),
        "dequantize_fp8": (numbers_of_fp8, [codes, of_rows]),
        "dequantize_fp8 of groups": (numbers_of_fp8, [codes, of_blocks]),
        "dequantize_table4": (numbers_of_table4, [*table4]),
    }


def heads():
    def attention(query, key, value, *added):
        return foo_ops.attention(
            query, key, value, *added, is_causal=True, softcap=3.0, return_logsumexp=True
        )

    def biased(query, key, value, *added):
        return foo_ops.attention(query, key, value, *added, return_logsumexp=True)

    def inputs(batch, heads, key_heads):
        return [randn(batch, heads, 5, 4), *(randn(batch, key_heads, 7, 4) for _ in range(2))]

    starts, starts_k = (torch.tensor(it, dtype=torch.int32) for it in ([0, 2, 6], [0, 5, 9]))

    def packed(query, key, value, starts, starts_k, slopes, sinks):
        return foo_ops.attention_varlen(
            query, key, value, starts, starts_k, None, None, slopes, sinks,
            max_seqlen_q=4, max_seqlen_k=5, return_logsumexp=True,
        )  # fmt: skip

    cache = [torch.randint(-127, 128, (4, 4, 7, 4), dtype=torch.int8) for _ in range(2)]
    used = torch.tensor([7, 3, 1, 0], dtype=torch.int32)

    def cached(query, key, value, used):
        scale = torch.ones_like(key[..., 0], dtype=query.dtype)
        output, _ = foo_ops.attention_int8_cache(
            query.detach(), key, value, scale, scale, None, used
        )
        # The operator has no gradients, but this file compares them; so add 0 * query.
        return output + 0 * query

    return {
        "attention_int8_cache": (cached, [randn(4, 8, 1, 4), *cache, used]),
        "attention": (attention, inputs(4, 8, 8)),
        "attention, shared heads": (attention, inputs(2, 8, 4)),
        "attention, one head of key": (attention, inputs(1, 8, 1)),
        "attention, heads in thirds": (attention, inputs(2, 6, 3)),
        "attention, bias": (biased, [*inputs(4, 4, 4), randn(4, 4, 5, 7)]),
        "attention, bias of heads": (
            biased,
            [*inputs(4, 4, 2), randn(4, 1, 7), randn(4), randn(4)],
        ),
        "attention, bias of batch": (biased, [*inputs(4, 4, 2), randn(4, 1, 5, 7), randn(4, 4)]),
        "attention_varlen": (
            packed,
            [randn(6, 8, 4), randn(9, 4, 4), randn(9, 4, 3), starts, starts_k, randn(8), randn(8)],
        ),
    }


def seeded(function, *tensors):
    """Call with a generator that differs on all processes but the first one."""
    rank = dist.get_rank()
    torch.manual_seed(7 if rank == 0 or not isinstance(tensors[0], DTensor) else rank)
    return function(*tensors)


def dropout():
    """Which weights attention drops depends on their places in the whole tensor."""

    def attention(query, key, value, *added):
        return foo_ops.attention(
            query, key, value, *added, dropout_p=0.4, window_right=3, return_logsumexp=True
        )

    starts, starts_k = (torch.tensor(it, dtype=torch.int32) for it in ([0, 2, 6], [0, 5, 9]))

    def packed(query, key, value, starts, starts_k, sinks):
        return foo_ops.attention_varlen(
            query, key, value, starts, starts_k, sinks=sinks,
            max_seqlen_q=4, max_seqlen_k=5, dropout_p=0.4, return_logsumexp=True,
        )  # fmt: skip

    def inputs(batch, heads, key_heads):
        return [randn(batch, heads, 5, 4), *(randn(batch, key_heads, 7, 4) for _ in range(2))]

    cases = {
        "attention": (attention, inputs(4, 8, 8)),
        "attention, shared heads": (attention, inputs(4, 8, 4)),
        "attention, uneven": (attention, inputs(3, 6, 3)),
        "attention, bias of heads": (attention, [*inputs(4, 4, 2), randn(4, 1, 7), randn(4)]),
        "attention_varlen": (
            packed,
            [randn(6, 8, 4), randn(9, 4, 4), randn(9, 4, 3), starts, starts_k, randn(2, 8)],
        ),
    }
    return {name: (functools.partial(seeded, f), tensors) for name, (f, tensors) in cases.items()}


def check_cases(cases):
    for device in ("cpu", "foo"):
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        torch.manual_seed(0)
        for name, (function, tensors) in cases().items():
            tensors = [it.to(device) for it in tensors]
            for placements in all_placements(tensors):
                try:
                    assert_as_one_process(function, tensors, mesh, placements)
                except Exception as error:
                    raise AssertionError(f"{name} on {device} with {placements}") from error


def on_elements():
    check_cases(elementwise)


def on_rows():
    check_cases(rows)


def on_products():
    check_cases(products)


def on_experts():
    check_cases(experts)


def on_heads():
    check_cases(heads)


def on_dropout():
    check_cases(dropout)
    torch.manual_seed(0)
    query = randn(4, 8, 5, 4)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    mine = placed(query, mesh, [Shard(1)])
    if dist.get_world_size() == 4:
        grid = dist.init_device_mesh("cpu", (2, 2))
        function = functools.partial(seeded, functools.partial(foo_ops.attention, dropout_p=0.4))
        assert_as_one_process(function, [query] * 3, grid, [[Shard(0), Shard(1)]] * 3)
    with torch.no_grad():
        torch.manual_seed(5)
        expected = foo_ops.attention(query, query, query, dropout_p=0.4)
        torch.manual_seed(5)
        actual = foo_ops.attention(mine, mine, mine, dropout_p=0.4)
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-12, atol=1e-12)


def on_operators_of_the_kit():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    x, scale = randn(4, 8, 3), randn(3)
    assert_as_one_process(kit.leaky, [x], mesh, [[Shard(1)]])
    placements = {
        (kit.leaky, Shard(2)): Shard(2),
        # Summing the parts and sharding the sum costs less than replicating it.
        (kit.leaky, Partial()): Shard(0),
        # The kernel's source shows that each row is computed on its own.
        (kit.row_sum, Shard(0)): Shard(0),
        (kit.row_sum, Shard(1)): Shard(1),
        (kit.row_sum, Shard(2)): Replicate(),
        # These kernels read other tiles, or do not work on rows.
        (kit.neighbours, Shard(0)): Replicate(),
        (kit.column_sum, Shard(0)): Replicate(),
        (kit.column_sum, Shard(1)): Replicate(),
        (kit.declared_column_sum, Shard(0)): Partial(),
        (kit.declared_column_sum, Shard(1)): Shard(0),
    }
    for (function, where), result in placements.items():
        columns = function in (kit.column_sum, kit.declared_column_sum)
        tensors = [x[0] if columns else x, *([scale] if function is kit.row_sum else [])]
        distributed = [placed(tensors[0], mesh, [where])]
        distributed += [placed(it, mesh, [Replicate()]) for it in tensors[1:]]
        actual = function(*distributed)
        assert actual.placements == (result,), (function, where, actual.placements)
        torch.testing.assert_close(actual.full_tensor(), function(*tensors))


def on_written_tensors():
    for device in ("cpu", "foo"):
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        x, scale = randn(4, 8).to(device), randn(4).to(device)
        for where in (Replicate(), Shard(0), Shard(1)):
            mine = placed(x.clone(), mesh, [where])
            assert torch.ops.foo.abs_(mine) is mine
            assert mine.placements == (where,)
            torch.testing.assert_close(mine.full_tensor(), x.abs())
            out = placed(torch.zeros_like(x), mesh, [where])
            result = foo_ops.abs(placed(x, mesh, [Shard(0)]), out=out)
            assert result is out
            torch.testing.assert_close(out.full_tensor(), x.abs())
        for where in (Replicate(), Shard(0)):
            mine = placed(x.clone(), mesh, [where])
            # The other tensor is redistributed to match.
            kit.scale_rows_(mine, placed(scale, mesh, [Shard(0)]))
            torch.testing.assert_close(mine.full_tensor(), x * scale[:, None])
        angles = placed(torch.full((1, 1), 0.5).to(x), mesh, [Replicate()])
        tables = angles.cos(), angles.sin()
        mine = placed(x.clone(), mesh, [Shard(0)])
        foo_ops.rotary_embedding(mine, *tables, inplace=True)
        expected = foo_ops.rotary_embedding(x, *(it.full_tensor() for it in tables))
        torch.testing.assert_close(mine.full_tensor(), expected)


def refused():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    x, scale = placed(randn(4, 8), mesh, [Shard(1)]), placed(randn(4), mesh, [Replicate()])
    with refuses(
        NotImplementedError,
        "sharded::scale_rows_: input is written and cannot be redistributed, so its placements "
        "must follow the sharding ... ., ... -> ... ., got Shard(dim=1)",
    ):
        kit.scale_rows_(x, scale)
    query = placed(randn(2, 4, 3, 8), mesh, [Shard(1)])
    for operator in ("flex_attention", "flex_attention_varlen"):
        # A function may read batch and head indices, which are unknown in a part.
        message = f"Operator foo.{operator}.default does not have a sharding strategy registered."
        with refuses(NotImplementedError, message):
            call_flex(operator, query, mesh)
    seed = placed(torch.zeros(1, dtype=torch.int64), mesh, [Replicate()])
    with refuses(
        NotImplementedError,
        "attention_seeded: dropout_heads must be given if DTensors have dropout, got None",
    ):
        torch.ops.foo.attention_seeded(query, query, query, seed=seed, dropout_p=0.5)
    target = placed(torch.zeros(4, dtype=torch.int64), mesh, [Replicate()])
    with refuses(
        TypeError, "softmax_cross_entropy: target must be a DTensor as others are, got a Tensor"
    ):
        foo_ops.softmax_cross_entropy(x, target.to_local())
    with refuses(
        TypeError, "linear_cross_entropy: weight must be a DTensor as others are, got a Tensor"
    ):
        foo_ops.linear_cross_entropy(x, torch.zeros(3, 8), target)


def call_flex(operator, query, mesh):
    if operator == "flex_attention":
        return foo_ops.flex_attention(query, query, query)
    starts = placed(torch.tensor([0, 2], dtype=torch.int32), mesh, [Replicate()])
    lengths = {"max_seqlen_q": 2, "max_seqlen_k": 2}
    return foo_ops.flex_attention_varlen(*[query[:, :, 0]] * 3, starts, starts, **lengths)


def nothing_travels():
    """Tensors sharded along batch, heads or rows are computed in place, on 2-D meshes too."""
    size = dist.get_world_size()
    meshes = {(Shard(0),): (size,), (Shard(1),): (size,)}
    if size == 4:
        meshes[Shard(0), Shard(1)] = (2, 2)
    for placements, shape in meshes.items():
        mesh = dist.init_device_mesh("cpu", shape)
        query, key, value = (placed(randn(4, 8, 3, 8), mesh, placements) for _ in range(3))
        weight = placed(randn(8), mesh, [Replicate()] * len(shape))
        calls = {
            foo_ops.attention: (query, key, value),
            foo_ops.rms_norm: (query, weight),
            foo_ops.silu_mul: (query, key),
        }
        for function, tensors in calls.items():
            with CommDebugMode() as communication:
                result = function(*tensors)
            assert communication.get_total_counts() == 0, function
            assert result.placements == placements, function
        whole_tensors = [it.full_tensor() for it in (query, key, value)]
        assert_as_one_process(foo_ops.attention, whole_tensors, mesh, [placements] * 3)


if __name__ == "__main__":
    run_checks(globals())
