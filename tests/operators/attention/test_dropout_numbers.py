"""Dropout of attention keeps weights as independent random numbers would."""

import itertools
import math

import pytest
import torch
from support.attention_dropout import (
    DTYPES,
    call,
    with_dropout,
    with_unit_value,
)

from foo_ops.testing import ATTENTION
from foo_ops.testing.spec import Sample, random
from foo_ops.testing.specs.attention import attention_sample, random_bias, random_mask

pytestmark = pytest.mark.usefixtures("one_thread")


def dropout_mask(device, dropout_p, *, seed=0, **sizes):
    """Return which probabilities are kept; scores are equal, so none is zero by itself."""
    sample = with_dropout(
        with_unit_value(attention_sample(**sizes, scale=0.0)(torch.float32)), dropout_p
    )
    output, _ = call(sample, device, seed)
    return output.cpu() != 0


# Probability that a bound below fails by chance.
CHANCE = 1e-9


def bound_of_mean(count, dropout_p=0.5):
    """Return Bernstein's bound for the mean of independent numbers that are 1 or 0."""
    variance = dropout_p * (1 - dropout_p)
    log = math.log(2 / CHANCE)
    return log / (3 * count) + math.sqrt((log / (3 * count)) ** 2 + 2 * log * variance / count)


def assert_independent(first, second):
    """Check that two masks, each half kept, agree in half of their places."""
    agreement = (first == second).double().mean().item()
    assert abs(agreement - 0.5) < bound_of_mean(first.numel())


@pytest.mark.parametrize("dropout_p", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("queries", [1, 150])
def test_as_many_are_kept_as_should_be(dropout_p, queries, device):
    """The kept share is right overall, and in each row, column and head."""
    mask = dropout_mask(device, dropout_p, batch=3, heads=4, queries=queries, keys=200).double()
    for dimensions in ((0, 1, 2, 3), (3,), (0, 1, 2), (2, 3)):
        means = mask.mean(dimensions)
        bound = bound_of_mean(mask.numel() // means.numel(), dropout_p)
        assert ((means - (1 - dropout_p)).abs() < bound).all()


def test_rows_vary_as_independent_numbers_do(device):
    """The kept count per row has the binomial variance, within 5 standard deviations."""
    dropout_p, keys = 0.3, 200
    mask = dropout_mask(device, dropout_p, batch=2, heads=4, queries=150, keys=keys)
    counts = mask.double().sum(-1)
    variance = keys * dropout_p * (1 - dropout_p)
    assert abs(counts.var().item() / variance - 1) < 5 * math.sqrt(2 / counts.numel())


def test_neighbours_are_independent(device):
    """Places do not agree at the distances at which tiles, blocks and counters repeat."""
    mask = dropout_mask(device, 0.5, batch=2, heads=4, queries=200, keys=200)
    for dimension, distances in ((0, [1]), (1, [1, 2]), (2, range(1, 130)), (3, range(1, 130))):
        for distance in distances:
            length = mask.shape[dimension] - distance
            first = mask.narrow(dimension, 0, length)
            assert_independent(first, mask.narrow(dimension, distance, length))


def test_seeds_and_calls_are_independent(device):
    masks = [dropout_mask(device, 0.5, queries=100, keys=200, seed=seed) for seed in range(4)]
    sample = with_unit_value(attention_sample(queries=100, keys=200, scale=0.0)(torch.float32))
    sample = with_dropout(sample, 0.5).to(device)
    masks += [sample.call(ATTENTION.operator)[0].cpu() != 0 for _ in range(3)]
    for first, second in itertools.combinations(masks, 2):
        assert_independent(first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 140])
def test_dropout_mask_depends_on_the_seed_and_the_place_alone(dtype, queries, device):
    """The mask depends on no values, head dimension, shared keys, mask, threads or device."""
    mask = dropout_mask("cpu", 0.4, heads=4, queries=queries, keys=150)
    others = [
        attention_sample(heads=4, queries=queries, keys=150, head_dim=64),
        attention_sample(heads=4, key_heads=2, queries=queries, keys=150, softcap=2.0),
        attention_sample(heads=4, queries=queries, keys=150, sinks=random_bias(4)),
        attention_sample(heads=4, queries=queries, keys=150, window_left=60),
        attention_sample(
            heads=4, queries=queries, keys=150, bias=random_mask(queries, 150), window_right=0
        ),
    ]
    for threads, make in enumerate(others, 1):
        torch.set_num_threads(min(threads, 3))
        sample = with_unit_value(make(dtype))
        undropped, _ = call(sample, device)
        output, _ = call(with_dropout(sample, 0.4), device)
        seen = undropped.cpu() != 0
        assert torch.equal(output.cpu() != 0, seen & mask)


def test_key_splits_have_their_own_numbers(device):
    """The 1025 keys of one query are split; 5 slices of the value show all weights."""
    query, key, _ = random("key splits", (1, 2, 1, 16), (1, 2, 1025, 16), (1,), dtype=torch.float32)
    unit = torch.eye(1025).expand(1, 2, -1, -1)
    slices = []
    for columns in unit.split(205, -1):
        sample = Sample((query, key, columns, None, None, None), {"scale": 0.0, "dropout_p": 0.5})
        slices.append(call(sample, device)[0].cpu() != 0)
    mask = torch.cat(slices, -1).double()
    assert abs(mask.mean().item() - 0.5) < bound_of_mean(mask.numel())
    for first, second in itertools.combinations(slices, 2):
        assert_independent(first, second)
