"""Calls of attention with dropout that show which weights are kept."""

import dataclasses

import torch

from foo_ops.testing import ATTENTION

DTYPES = ATTENTION.dtypes


# Large, so that small probabilities do not become zero in float16.
UNIT = 256.0


def with_unit_value(sample):
    """Set each key's value to UNIT in a column of its own."""
    query, key, value, *others = sample.inputs
    unit = UNIT * torch.eye(key.shape[2], dtype=value.dtype).expand(*key.shape[:2], -1, -1)
    return dataclasses.replace(sample, inputs=(query, key, unit, *others))


def assert_zero_only_where_masked(undropped, exact):
    """Check the weights without dropout: a zero with dropout then means a dropped weight."""
    assert torch.equal(undropped.cpu() == 0, exact == 0)


def with_dropout(sample, dropout_p):
    return dataclasses.replace(sample, keywords={**sample.keywords, "dropout_p": dropout_p})


def call(sample, device, seed=0):
    torch.manual_seed(seed)
    return sample.to(device).call(ATTENTION.operator)
