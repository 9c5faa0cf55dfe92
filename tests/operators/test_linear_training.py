"""Operators that linear layers run in training, and products that they do not compute twice."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import foo_ops


class Calls(TorchDispatchMode):
    """Records the names of foo's operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "foo":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh", None])
def test_products_of_training_are_not_computed_again_for_gradients(activation):
    """Without gradients one pass computes all; with them, two steps save the sums for backward."""
    input, *weights = (torch.randn(5, 7, requires_grad=True) for _ in range(3))

    def run():
        if activation is None:
            return foo_ops.linear_silu_mul(input, *weights)
        return foo_ops.linear(input, weights[0], activation=activation)

    with torch.no_grad(), Calls() as alone:
        run()
    with Calls() as recorded:
        output = run()
    with Calls() as backward:
        output.sum().backward()
    products = 2 if activation is None else 1
    assert len(alone.names) == 1
    assert recorded.names.count("linear.default") == products
    assert backward.names.count("linear_backward.default") == products
    assert "linear.default" not in backward.names
