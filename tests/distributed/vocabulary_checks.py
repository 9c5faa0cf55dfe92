"""Checks that test_sharding.py runs on several processes: losses with sharded classes."""

import functools
import itertools

import torch
import torch.distributed as dist
from sharding_checks import assert_as_one_process, placed, randn
from support.ranks import refuses, run_checks
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import foo_ops


def losses(classes, large=1.0, **options):
    """Return each loss with its tensors, and their placements when classes are sharded."""
    torch.manual_seed(0)
    target = torch.randint(classes, (4, 3))
    target[0, :2] = options.get("ignore_index", -100)
    hidden, weight = large * randn(4, 3, 5), randn(classes, 5)
    softmax, linear = (
        functools.partial(it, return_logsumexp=True, **options)
        for it in (foo_ops.softmax_cross_entropy, foo_ops.linear_cross_entropy)
    )
    whole, cut = Replicate(), Shard(0)
    return [
        (softmax, [hidden @ weight.T, target], [Shard(2), whole]),
        (linear, [hidden, weight, target], [whole, cut, whole]),
        (linear, [hidden, weight, target, randn(classes)], [whole, cut, whole, cut]),
        (functools.partial(linear, softcap=2.0), [hidden, weight, target], [whole, cut, whole]),
    ]


def each():
    for classes, reduction, smoothing in itertools.product(
        (10, 3), ("mean", "none"), (0.0, 0.3, 1.0)
    ):
        yield from losses(classes, reduction=reduction, label_smoothing=smoothing)
    # Large logsumexps, an ignored class, and probabilities of zero.
    yield from losses(10, large=1000.0)
    yield from losses(10, ignore_index=4)
    function, (logits, target), placements = losses(10)[0]
    logits[..., 5:] = -torch.inf
    yield function, [logits, target % 5], placements
    # On one process, a row has an infinite logit that is not its target.
    for smoothing in (0.0, 0.3):
        cases = losses(10, reduction="none", label_smoothing=smoothing)
        for place, (function, tensors, placements) in enumerate(cases[:3:2]):
            tensors[-1 if place else 0][..., 7] = torch.inf
            target = tensors[1 + place]
            tensors[1 + place] = target.where(target != 7, 1)
            yield function, tensors, placements


def on_classes():
    for device in ("cpu", "foo"):
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        for function, tensors, placements in each():
            tensors = [it.to(device) for it in tensors]
            assert_as_one_process(function, tensors, mesh, [[it] for it in placements])


def on_rows_and_classes():
    if dist.get_world_size() != 4:
        return
    mesh = dist.init_device_mesh("cpu", (2, 2))
    for function, tensors, placements in losses(10, label_smoothing=0.2):
        both = [[Shard(0), placements[0]], *([Replicate(), it] for it in placements[1:])]
        assert_as_one_process(function, tensors, mesh, both)
        # Both dimensions of the mesh shard the classes.
        assert_as_one_process(function, tensors, mesh, [[it, it] for it in placements])


def nothing_is_gathered():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for function, tensors, placements in losses(10, reduction="none"):
        leaves = [placed(it, mesh, [where]) for it, where in zip(tensors, placements)]
        leaves = [it.requires_grad_(it.is_floating_point()) for it in leaves]
        with CommDebugMode() as communication:
            loss, _ = function(*leaves)
        names = {str(name).split(".")[-1] for name in communication.get_comm_counts()}
        # The maximum, the sum and the loss; and the mean, which is computed with them.
        assert names == {"all_reduce"}, names
        with CommDebugMode() as communication:
            loss.sum().backward()
        assert communication.get_total_counts() <= 1, communication.get_comm_counts()
        for leaf in leaves[:2]:
            if leaf.requires_grad and leaf.placements[0].is_shard():
                assert leaf.grad.placements == leaf.placements


def refused():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for function, tensors, placements in losses(10)[:2]:
        operator = function.func.__name__
        tensors[-1][1, 1] = 10
        parts = [placed(it, mesh, [where]) for it, where in zip(tensors, placements)]
        with refuses(
            IndexError,
            f"{operator}: target must be a class in [0, 10) or ignore_index -100, got 10",
        ):
            function(*parts)


if __name__ == "__main__":
    run_checks(globals())
