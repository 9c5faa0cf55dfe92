"""Checks that test_modules.py runs on several processes: a block, sharded in each way."""

import torch
import torch.distributed as dist
from support.ranks import run_checks
from support.transformer_block import loss_of, make_batch, make_block
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

DEVICES = ("cpu", "foo")


def parallel_plan(outside):
    """Shard heads and hidden features; tensors between the blocks are placed as ``outside``."""
    columns, rows = ColwiseParallel, RowwiseParallel
    inputs = PrepareModuleInput(
        input_layouts=(outside,), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    plan = {
        "attention": inputs,
        "feed": inputs,
        "attention.output": rows(output_layouts=outside, use_local_output=False),
        "feed.down": rows(output_layouts=outside, use_local_output=False),
        "attention_norm": SequenceParallel(),
        "feed_norm": SequenceParallel(),
    }
    for layer in ("attention.query", "attention.key", "attention.value", "feed.gate", "feed.up"):
        plan[layer] = columns(use_local_output=False)
    return plan


def assert_trained_as_one(loss, block, device):
    """Compare the loss and all gradients with those of one process."""
    alone = make_block(device)
    expected = loss_of(alone, make_batch(device))
    expected.backward()
    torch.testing.assert_close(whole(loss), expected.detach(), rtol=1e-12, atol=1e-12)
    pairs = zip(block.named_parameters(), alone.parameters(), strict=True)
    for (name, parameter), theirs in pairs:
        actual = whole(parameter.grad)
        torch.testing.assert_close(
            actual, theirs.grad, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: name + text
        )


def whole(tensor):
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def tensor_parallel():
    """parallelize_module shards heads: our operators themselves communicate nothing."""
    for device in DEVICES:
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        block = parallelize_module(make_block(device), mesh, parallel_plan(Shard(1)))
        batch = distribute_tensor(make_batch(device), mesh, [Shard(1)])
        with CommDebugMode() as communication:
            loss = loss_of(block, batch)
        # Attention and feed-forward each gather their inputs once and sum their outputs once.
        counts = communication.get_comm_counts()
        assert sum(counts.values()) == 4, counts
        loss.backward()
        assert_trained_as_one(loss, block, device)


def fully_sharded():
    for device in DEVICES:
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        block = make_block(device)
        for part in (block.attention, block.feed):
            fully_shard(part, mesh=mesh)
        fully_shard(block, mesh=mesh)
        batch = make_batch(device).chunk(mesh.size())[mesh.get_local_rank()]
        loss = loss_of(block, batch)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert_trained_as_one(mean / mesh.size(), block, device)


def tensor_parallel_and_fully_sharded():
    for device in DEVICES:
        mesh = dist.init_device_mesh(device, (2, 2), mesh_dim_names=("data", "heads"))
        block = parallelize_module(make_block(device), mesh["heads"], parallel_plan(Shard(1)))
        fully_shard(block, mesh=mesh["data"])
        part = make_batch(device).chunk(2)[mesh.get_local_rank("data")]
        loss = loss_of(block, distribute_tensor(part, mesh["heads"], [Shard(1)]))
        loss.backward()
        mean = whole(loss).clone()
        dist.all_reduce(mean, group=mesh.get_group("data"))
        assert_trained_as_one(mean / 2, block, device)


if __name__ == "__main__":
    run_checks(globals())
