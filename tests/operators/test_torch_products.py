"""The table of products that PyTorch's kernels compute: which take that route, and their values."""

import os
import subprocess
import sys

import pytest
import torch
from llvmlite.binding import get_host_cpu_features
from support.exact import assert_near
from torch.profiler import ProfilerActivity, profile

import foo_ops
from foo_ops.kernels.compiler.processor import _has_quick_dot, target

EVENT = "foo::linear by aten::mm"
ASKS_FOR_OTHERS = (
    *("FOO_VECTOR_BITS", "FOO_BFLOAT16_PAIRS", "FOO_MATRIX_UNIT", "FOO_TORCH_PRODUCTS"),
    *("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"),
)
LEAVES_PRODUCTS = not any(os.environ.get(it) for it in ASKS_FOR_OTHERS)
IS_AMD = target()[1].startswith("znver")
HAS_AVX512 = get_host_cpu_features().get("avx512f", False)
BY_MKL = LEAVES_PRODUCTS and IS_AMD and not HAS_AVX512 and torch.backends.mkl.is_available()
MEASURED = {
    torch.bfloat16: LEAVES_PRODUCTS and _has_quick_dot(),
    torch.float32: BY_MKL,
    torch.float64: BY_MKL,
}
# PyTorch sums in float32, and rounds to bfloat16 once. MKL adds the sums of others to a large bias.
ROUNDINGS = {torch.bfloat16: 2, torch.float32: 32, torch.float64: 32}
ALL = "bfloat16 float32 float64"
WIDTH, OUTPUTS = 768, 640


def tensors(rows, dtype, device):
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, WIDTH), (OUTPUTS, WIDTH), (rows, OUTPUTS))
    input, weight, gradient = (torch.randn(it, generator=generator).to(dtype) for it in shapes)
    return (it.to(device) for it in (input, weight / WIDTH**0.5, gradient))


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
    ("product", "rows", "dtypes"),
    [
        (forward, 8, ""), (forward, 16, ""), (forward, 24, "bfloat16"), (forward, 32, ""),
        (forward, 127, ""), (forward, 128, "bfloat16"), (forward, 255, "bfloat16"),
        (forward, 256, ALL), (forward, 1100, ALL),
        (with_bias, 8, ""), (with_bias, 24, "bfloat16"), (with_bias, 255, ""),
        (with_bias, 256, ALL), (with_bias, 700, ALL),
        (grad_input, 8, ""), (grad_input, 64, "bfloat16"), (grad_input, 300, ALL),
        (grad_weight, 16, "bfloat16"), (grad_weight, 300, "bfloat16"),
        (grad_weight, 600, "bfloat16 float32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", MEASURED, ids=str)
def test_route_and_values(product, rows, dtypes, dtype, device):
    given = tuple(tensors(rows, dtype, device))
    (result, exact), count = by_torch(lambda: product(*given))
    is_torchs = str(dtype).removeprefix("torch.") in dtypes.split()
    assert count == int(is_torchs and MEASURED[dtype])
    assert_near(result.cpu(), exact().cpu(), roundings=ROUNDINGS[dtype])


@pytest.mark.parametrize("dtype", MEASURED, ids=str)
def test_what_is_not_in_the_table(dtype, device):
    input, weight, gradient = tensors(256, dtype, device)
    assert by_torch(lambda: foo_ops.linear(input, weight, activation="relu"))[1] == 0
    assert by_torch(lambda: forward(input[:, :8], weight[:, :8], gradient))[1] == 0
    assert by_torch(lambda: forward(input.half(), weight.half(), gradient))[1] == 0


@pytest.mark.parametrize("dtype", MEASURED, ids=str)
def test_other_strides(dtype, device):
    """Gradients that are repeated, or lie in memory by columns, come to what they say."""
    input, weight, gradient = tensors(256, dtype, device)
    for grad in (gradient[:1].expand(256, -1), gradient.t().contiguous().t(), gradient):
        results = torch.ops.foo.linear_backward(grad, input.flip(0), weight)
        exact = grad.double() @ weight.double(), grad.double().mT @ input.flip(0).double()
        for result, expected in zip(results, exact):
            assert_near(result.cpu(), expected.cpu(), roundings=ROUNDINGS[dtype])


@pytest.mark.parametrize("rows", [256, 1100])
@pytest.mark.parametrize("dtype", MEASURED, ids=str)
def test_same_result_for_every_number_of_threads(rows, dtype):
    given = tuple(tensors(rows, dtype, "cpu"))
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
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        foo_ops.linear(*torch.ones(2, 512, 512, dtype=dtype).unbind())
assert {EVENT!r} not in [it.key for it in seen.key_averages()]
"""


@pytest.mark.parametrize("variable", ["FOO_TORCH_PRODUCTS", "FOO_BFLOAT16_PAIRS"])
def test_switched_off(variable):
    environment = os.environ | {variable: "0"}
    subprocess.run([sys.executable, "-c", SWITCHED_OFF], env=environment, check=True)
