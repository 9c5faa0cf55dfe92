"""Sizes that depend on data, in every dimension of every tensor at once."""

import pytest
import torch
from support.parts import whole
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import foo_ops
from foo_ops import testing
from foo_ops.testing import cases
from foo_ops.testing.checks.compilation import check_counted_sizes

DAILY = (testing.ATTENTION, testing.LINEAR, testing.RMS_NORM, testing.SOFTMAX_CROSS_ENTROPY)
OTHERS = [spec for spec in testing.OPERATORS if spec not in DAILY]


@pytest.mark.parametrize("spec", [*DAILY, *whole(*OTHERS)], ids=str)
def test_every_dimension_may_depend_on_data(spec):
    """The matrix tests only the dimensions that may grow, since others may be fixed."""
    case, *_ = cases(spec, ["compiled_for_counted_sizes"])
    check_counted_sizes(case, [list(range(it.dim())) for it in case.sized(9).tensors()])


@pytest.mark.parametrize("counted", ["batch", "length", "heads"])
def test_output_lies_in_memory_as_a_transposed_query_does(counted):
    """Strides are those of (batch, length, heads, dim), whichever size depends on data."""
    dim = ("batch", "length", "heads").index(counted)
    with FakeTensorMode(shape_env=ShapeEnv()):
        mask = torch.ones((4, 5, 2)[dim], dtype=torch.bool)
        query = torch.ones(4, 5, 2, 8).index_select(dim, mask.nonzero().flatten()).transpose(1, 2)
        output = foo_ops.attention(query, query, query)
    assert output.stride() == query.stride()
