"""Checks that test_distributed.py runs on two processes."""

import copy
import datetime
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.distributed_training import (
    RANKS,
    Net,
    assert_trained,
    batches,
    make_net,
    my_part,
    train,
)
from support.exact import assert_near
from support.ranks import run_checks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from foo_ops.device import _registration


def numbers(device, size=6, dtype=torch.float32):
    """Make numbers that differ from rank to rank."""
    return (torch.arange(size) + 10 * dist.get_rank() + 1).to(device, dtype)


def empty(device, size=6):
    return torch.empty(size, device=device)


def all_reduce(device):
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = numbers(device, dtype=dtype)
            dist.all_reduce(tensor, operation)
            yield tensor
    view = numbers(device)[2:4]
    dist.all_reduce(view)
    yield view
    number = numbers(device).sum() * 1j
    dist.all_reduce(number)
    yield number
    parameter = nn.Parameter(numbers(device))
    dist.all_reduce(parameter)
    yield parameter.detach()
    with torch.inference_mode():
        tensor = numbers(device)
        dist.all_reduce(tensor)
        yield tensor.clone()
    nothing = empty(device, 0)
    dist.all_reduce(nothing)
    yield nothing


def all_reduce_sparse(device):
    indices = torch.tensor([[dist.get_rank(), 2]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (4,)).to(device)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    yield tensor.to_dense()
    yield work.get_future().value()[0].to_dense()


def broadcast(device):
    tensor = numbers(device)
    dist.broadcast(tensor, 1)
    yield tensor


def reduce(device):
    tensor = numbers(device)
    dist.reduce(tensor, 0)
    if dist.get_rank() == 0:
        yield tensor


def all_gather(device):
    tensors = [empty(device) for _ in range(RANKS)]
    dist.all_gather(tensors, numbers(device))
    yield from tensors
    tensor = empty(device, 12)
    dist.all_gather_into_tensor(tensor, numbers(device))
    yield tensor


def gather(device):
    tensors = [empty(device) for _ in range(RANKS)] if dist.get_rank() == 0 else None
    dist.gather(numbers(device), tensors, 0)
    yield from tensors or ()


def scatter(device):
    tensors = list(numbers(device).chunk(RANKS)) if dist.get_rank() == 1 else None
    tensor = empty(device, 3)
    dist.scatter(tensor, tensors, 1)
    yield tensor


def reduce_scatter(device):
    tensor = empty(device, 3)
    dist.reduce_scatter(tensor, list(numbers(device).chunk(RANKS)))
    yield tensor
    dist.reduce_scatter_tensor(tensor, numbers(device))
    yield tensor


def all_to_all(device):
    tensors = [empty(device, 3) for _ in range(RANKS)]
    dist.all_to_all(tensors, list(numbers(device).chunk(RANKS)))
    yield from tensors
    mine, others = ([1, 5], [1, 2]) if dist.get_rank() == 0 else ([2, 4], [5, 4])
    tensor = empty(device, sum(others))
    dist.all_to_all_single(tensor, numbers(device), others, mine)
    yield tensor


def point_to_point(device):
    other = 1 - dist.get_rank()
    tensor = empty(device)
    if dist.get_rank() == 0:
        dist.send(numbers(device), other)
        assert dist.recv(tensor) == other
    else:
        dist.recv(tensor, other)
        dist.send(numbers(device), other)
    yield tensor
    tensor = empty(device)
    operations = [
        dist.P2POp(dist.isend, numbers(device), other),
        dist.P2POp(dist.irecv, tensor, other),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    yield tensor


def works(device):
    tensor = numbers(device)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] + 1)
    assert work.wait(datetime.timedelta(seconds=60))
    assert work.is_completed()
    assert work.is_success()
    work.synchronize()
    yield tensor
    yield future.wait()
    (result,) = work.result()
    assert result.data_ptr() == tensor.data_ptr()
    yield result


def functional_collectives(device):
    for function, arguments in (
        (functional.all_reduce, ("sum",)),
        (functional.all_gather_tensor, (0,)),
        (functional.reduce_scatter_tensor, ("sum", 0)),
    ):
        tensor = numbers(device)
        yield function(tensor, *arguments, dist.group.WORLD) + 0
        compiled = torch.compile(
            lambda tensor, function=function, arguments=arguments: (
                function(tensor, *arguments, dist.group.WORLD) * 2
            ),
            backend="aot_eager",
        )
        yield compiled(tensor)


def other_groups(device):
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        tensor = numbers(device)
        dist.all_reduce(tensor, group=group)
        yield tensor
    dist.barrier()
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"on": numbers(device)})
    yield objects[1 - dist.get_rank()]["on"]


def collectives():
    """Collectives give the CPU's numbers, in the given memory."""
    for check in (
        all_reduce,
        all_reduce_sparse,
        broadcast,
        reduce,
        all_gather,
        gather,
        scatter,
        reduce_scatter,
        all_to_all,
        point_to_point,
        works,
        functional_collectives,
        other_groups,
    ):
        expected, actual = (list(check(device)) for device in ("cpu", "foo:1"))
        assert all(tensor.device == torch.device("foo:1") for tensor in actual), check
        torch.testing.assert_close([tensor.cpu() for tensor in actual], expected, rtol=0, atol=0)


def no_copies():
    tensor = torch.ones(1 << 20, device="foo")
    torch.foo.reset_peak_memory_stats()
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    assert torch.foo.max_memory_allocated() == torch.foo.memory_allocated()
    assert tensor.eq(2).all()


def memory_that_moves_meanwhile():
    """A running collective keeps its memory and its result."""
    ways = (
        lambda tensor: tensor.untyped_storage().resize_(0),
        lambda tensor: tensor.resize_(1 << 24),
        lambda tensor: _registration._reduce(tensor.untyped_storage()),
        lambda tensor: tensor.set_(),
    )
    for move in ways:
        tensor = torch.ones(1 << 20, device="foo")
        # The other process is late, so that this one resizes its tensor before the numbers arrive.
        time.sleep(0.3 * dist.get_rank())
        work = dist.all_reduce(tensor, async_op=True)
        move(tensor)
        torch.foo.empty_cache()
        others = [torch.full((1 << 20,), 5.0, device="foo") for _ in range(8)]
        work.wait()
        (result,) = work.result()
        assert result.eq(2).all()
        assert all(other.eq(5).all() for other in others)


def memory_that_is_copied_on_writing():
    tensor = torch.ones(1000, device="foo")
    clone = torch._lazy_clone(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.eq(2).all()
    assert clone.eq(1).all()


def refused():
    message = "c10d::allgather_: expected all tensors on foo, but found one on cpu"
    for mixed in ([numbers("foo"), numbers("cpu")], [numbers("cpu"), numbers("foo")]):
        with pytest.raises(RuntimeError, match=message):
            dist.all_gather(mixed, numbers("foo"))


def data_parallel():
    for options in (
        {},
        {"device_ids": ["foo:0"]},
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "bucket_cap_mb": 0.0001},
        {"find_unused_parameters": True},
    ):
        model = DistributedDataParallel(make_net().to("foo:0"), **options)
        train(model, map(my_part, batches("foo:0")))
        assert_trained(model.parameters())
    model = DistributedDataParallel(make_net().to("foo"))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, map(my_part, batches("foo")))
    assert_trained(model.parameters())


def data_parallel_with_sparse_gradients():
    net = make_net()
    net.embedding.sparse = True
    expected = copy.deepcopy(net)
    train(expected, batches("cpu"), torch.optim.SGD)
    model = DistributedDataParallel(net.to("foo"))
    train(model, map(my_part, batches("foo")), torch.optim.SGD)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-9, atol=1e-9)


def data_parallel_with_different_starts():
    """Rank 0 sends the others its weights and its buffers."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Net().to("foo"))
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        others = [torch.empty_like(tensor) for _ in range(RANKS)]
        dist.all_gather(others, tensor.detach())
        assert torch.equal(*others)


def sync_batch_norm():
    """Parts of a batch, of different sizes, are normalized like the whole batch."""
    rank = dist.get_rank()
    for dtype, shape in ((torch.float64, (5, 3)), (torch.float32, (5, 3, 4, 2))):
        whole = torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
        weights = torch.linspace(-1, 2, whole.numel(), dtype=dtype).reshape(shape)
        rows = slice(0, 2) if rank == 0 else slice(2, 5)
        kind = nn.BatchNorm1d if whole.dim() == 2 else nn.BatchNorm2d
        reference = kind(3).double()
        nn.init.uniform_(reference.weight, generator=torch.Generator().manual_seed(2))
        synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
        synchronized.to("foo", dtype)
        expected_x = whole.double().clone().requires_grad_()
        x = whole[rows].to("foo").requires_grad_()
        expected, actual = reference(expected_x), synchronized(x)
        (expected * weights).sum().backward()
        (actual * weights[rows].to("foo")).sum().backward()
        assert_near(actual, expected[rows])
        assert_near(x.grad, expected_x.grad[rows])
        assert_near(synchronized.running_mean, reference.running_mean)
        assert_near(synchronized.running_var, reference.running_var)
        for one, other in zip(synchronized.parameters(), reference.parameters()):
            dist.all_reduce(one.grad)
            assert_near(one.grad, other.grad)


def fully_sharded():
    net = make_net().to("foo")
    mesh = dist.init_device_mesh("foo", (RANKS,))
    for layer in (net.layers, net.head):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, map(my_part, batches("foo")))
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    assert_trained(parameter.full_tensor() for parameter in net.parameters())


def fully_sharded_first_version():
    model = FullyShardedDataParallel(make_net(), device_id=torch.device("foo:0"))
    train(model, map(my_part, batches("foo:0")))
    with FullyShardedDataParallel.summon_full_params(model):
        assert_trained(model.parameters())


def distributed_tensors():
    mesh = dist.init_device_mesh("foo", (RANKS,))
    torch.manual_seed(0)
    a, b = torch.randn(8, 6), torch.randn(6, 4)
    product = distribute_tensor(a, mesh, [Shard(0)]) @ distribute_tensor(b, mesh, [Replicate()])
    assert product.to_local().device.type == "foo"
    assert product.to_local().shape == (4, 4)
    columns = product.redistribute(mesh, [Shard(1)])
    assert_near(columns.full_tensor(), a.double() @ b.double())


def default_backend():
    assert dist.get_default_backend_for_device("foo") == "gloo"
    tensor = numbers("foo")
    dist.all_reduce(tensor)
    assert tensor.tolist() == [12, 14, 16, 18, 20, 22]
    objects = [None] * RANKS
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == [0, 1]


if __name__ == "__main__":
    run_checks(globals())
