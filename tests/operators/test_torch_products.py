"""The table of products that PyTorch's kernels compute: which take that route, and their values."""

import os
import subprocess
import sys

import pytest
import torch
from support.exact import assert_near
from torch.profiler import ProfilerActivity, profile

import foo_ops
from foo_ops.kernels.compiler.processor import _has_quick_dot

EVENT = "foo::linear by aten::mm"
ASKS_FOR_OTHERS = (
    *("FOO_VECTOR_BITS", "FOO_BFLOAT16_PAIRS", "FOO_MATRIX_UNIT", "FOO_TORCH_PRODUCTS"),
    *("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"),
)
HAS_PROCESSOR = _has_quick_dot() and not any(os.environ.get(it) for it in ASKS_FOR_OTHERS)
WIDTH, OUTPUTS = 768, 640


def tensors(rows, dtype, device, width=WIDTH):
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (OUTPUTS, width), (rows, OUTPUTS))
    input, weight, gradient = (torch.randn(it, generator=generator).to(dtype) for it in shapes)
    return (it.to(device) for it in (input, weight / width**0.5, gradient))


def forward(input, weight, gradient):
    return foo_ops.linear(input, weight), lambda: input.double() @ weight.double().mT


def with_bias(input, weight, gradient):
    """Take every third number of a row for the bias, which is larger than the sums."""
    bias = 8 * torch.cat((gradient, gradient, gradient), 1)[0, ::3]
    result = foo_ops.linear(input, weight, bias)
    return result, lambda: input.double() @ weight.double().mT + bias.double()


def grad_input(input, weight, gradient):
    result = torch.ops.foo.linear_backward(gradient, input, weight, weight_requires_grad=False)
    return result[0], lambda: gradient.double() @ weight.double()


def grad_weight(input, weight, gradient):
    result = torch.ops.foo.linear_backward(gradient, input, weight, input_requires_grad=False)
    return result[1], lambda: gradient.double().mT @ input.double()


def by_torch(function):
    """Return what a function does, and how many products were PyTorch's."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        result = function()
    return result, sum(it.count for it in seen.key_averages() if it.key == EVENT)


@pytest.mark.parametrize(
    ("product", "rows", "is_torchs"),
    [
        (forward, 8, False), (forward, 16, False), (forward, 24, True), (forward, 32, False),
        (forward, 127, False), (forward, 128, True), (with_bias, 8, False), (with_bias, 24, True),
        (with_bias, 255, False), (with_bias, 256, True), (grad_input, 8, False),
        (grad_input, 64, True),
        (grad_weight, 16, True), (grad_weight, 300, True),
    ],
)  # fmt: skip
def test_route_and_values(product, rows, is_torchs, device):
    given = tuple(tensors(rows, torch.bfloat16, device))
    (result, exact), count = by_torch(lambda: product(*given))
    assert count == int(is_torchs and HAS_PROCESSOR)
    assert_near(result.cpu(), exact().cpu(), roundings=2)


def test_what_is_not_in_the_table(device):
    float32 = tuple(tensors(128, torch.float32, device))
    assert by_torch(lambda: forward(*float32))[1] == 0
    input, weight, _ = tensors(128, torch.bfloat16, device)
    assert by_torch(lambda: foo_ops.linear(input, weight, activation="relu"))[1] == 0
    small = tuple(tensors(128, torch.bfloat16, device, width=8))
    assert by_torch(lambda: forward(*small))[1] == 0


def test_other_strides(device):
    """Gradients that are repeated, or lie in memory by columns, come to what they say."""
    input, weight, gradient = tensors(256, torch.bfloat16, device)
    for grad in (gradient[:1].expand(256, -1), gradient.t().contiguous().t(), gradient):
        results = torch.ops.foo.linear_backward(grad, input.flip(0), weight)
        exact = grad.double() @ weight.double(), grad.double().mT @ input.flip(0).double()
        for result, expected in zip(results, exact):
            assert_near(result.cpu(), expected.cpu(), roundings=2)


def test_same_result_for_every_number_of_threads():
    given = tuple(tensors(256, torch.bfloat16, "cpu"))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([it(*given)[0] for it in (forward, with_bias, grad_input, grad_weight)])
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


SWITCHED_OFF = f"""
import torch
import foo_ops
from torch.profiler import profile

with profile() as seen:
    foo_ops.linear(*torch.ones(2, 512, 512, dtype=torch.bfloat16).unbind())
assert {EVENT!r} not in [it.key for it in seen.key_averages()]
"""


@pytest.mark.parametrize("variable", ["FOO_TORCH_PRODUCTS", "FOO_BFLOAT16_PAIRS"])
def test_switched_off(variable):
    environment = os.environ | {variable: "0"}
    subprocess.run([sys.executable, "-c", SWITCHED_OFF], env=environment, check=True)
