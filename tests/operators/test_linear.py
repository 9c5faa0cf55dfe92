"""foo::linear: sizes around those of its blocks, layouts of memory, errors, and saved tensors.

Properties of every operator are tested in test_matrix.py.
"""

import contextlib
import itertools
import re

import pytest
import torch
from support.parts import whole
from support.processes import run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import foo_ops
from foo_ops.testing import (
    LINEAR,
    Sample,
    check_gradients,
    check_outputs,
    cotangents_for,
    random,
    reference,
)

DTYPES = LINEAR.dtypes


def draw(rows, columns, depth, dtype):
    return random("linear", (rows, depth), (columns, depth), (columns,), dtype=dtype)


def check(dtype, *inputs):
    check_outputs(LINEAR, Sample(inputs), dtype, (foo_ops.linear(*inputs),))


def check_with_gradients(dtype, *inputs):
    sample = Sample(inputs).requiring_grad()
    outputs = LINEAR.call(sample)
    cotangents = cotangents_for(outputs)
    check_outputs(LINEAR, Sample(inputs), dtype, tuple(it.detach() for it in outputs))
    gradients = torch.autograd.grad(outputs, sample.tensors(), cotangents)
    check_gradients(LINEAR, sample, gradients, cotangents)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 17])
def test_few_rows(rows, dtype):
    for columns, depth in ((1, 1), (3, 64), (16, 31), (33, 130), (67, 515), (70, 1024)):
        check(dtype, *draw(rows, columns, depth, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_and_weights_that_fit_no_cache(rows, dtype):
    for columns, depth in ((1100, 1024), (33_000, 33), (777, 1601)):
        check(dtype, *draw(rows, columns, depth, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 5, 8])
def test_few_columns(columns, dtype):
    for rows, depth in ((9, 1), (33, 130), (1100, 65), (70, 1024)):
        input, weight, bias = draw(rows, columns, depth, dtype)
        check_with_gradients(dtype, input, weight, bias)
        check_with_gradients(dtype, input, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_those_of_blocks(dtype):
    for rows, columns, depth in (
        (239, 63, 127),
        (240, 64, 128),
        (241, 257, 129),
        (12, 255, 512),
        (9, 321, 513),
        (484, 65, 257),
    ):
        check_with_gradients(dtype, *draw(rows, columns, depth, dtype))


def transposed(tensor):
    return tensor.t().contiguous().t()


def strided(tensor):
    wide = torch.full((tensor.shape[0], 2 * tensor.shape[1]), torch.nan, dtype=tensor.dtype)
    wide[:, ::2] = tensor
    return wide[:, ::2]


def with_odd_stride(tensor):
    wide = torch.full((tensor.shape[0], tensor.shape[1] | 1), torch.nan, dtype=tensor.dtype)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


LAYOUTS = (torch.clone, transposed, strided, with_odd_stride)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 50])
def test_layouts(rows, dtype):
    """Transposed, in steps of 2, and with rows that bfloat16 cannot read in whole pairs."""
    input, weight, bias = draw(rows, 40, 70, dtype)
    for of_input, of_weight in itertools.product(LAYOUTS, LAYOUTS):
        check_with_gradients(dtype, of_input(input), of_weight(weight), bias)
    repeated = bias[:1].expand(40)
    check(dtype, input[:1].expand(rows, 70), weight[:1].expand(40, 70), repeated)
    check(dtype, input[:, :1].expand(rows, 70), weight[:, :1].expand(40, 70), repeated)
    batch = input[: rows // 2 * 2].unflatten(0, (2, -1)).transpose(0, 1)
    check(dtype, batch, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_beyond_2_to_the_31st_element(dtype):
    stride = 2**30 + 8
    memory = torch.empty(2 * stride + 64, dtype=dtype)
    weight = memory.as_strided((3, 64), (stride, 1))
    input, values, bias = draw(70, 3, 64, dtype)
    weight.copy_(values)
    for rows in (1, 70):
        expected = foo_ops.linear(input[:rows], values, bias)
        assert torch.equal(foo_ops.linear(input[:rows], weight, bias), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 2000, 300), (1, 1999, 600), (7, 500, 300), (100, 130, 300), (600, 9, 300)]
)
def test_threads_do_not_change_the_results(shape, dtype):
    inputs = [it.requires_grad_() for it in draw(*shape, dtype)]
    found = []
    threads = torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        output = foo_ops.linear(*inputs)
        found.append([output, *torch.autograd.grad(output, inputs, torch.ones_like(output))])
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_bias_is_rounded_once():
    """In bfloat16, 256 + 1 + 1 is 258, but 257 is rounded to 256."""
    ones = torch.ones(1, 257, dtype=torch.bfloat16)
    assert foo_ops.linear(ones, ones, ones[0, :1]).item() == 258


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_only_what_is_needed_is_saved_and_computed(device):
    input, weight, bias = (it.to(device) for it in draw(5, 3, 4, torch.float32))
    for needed, count in {
        (True, False, False): 1,
        (False, True, False): 1,
        (True, True, True): 2,
    }.items():
        tensors = [
            it.detach().requires_grad_(is_needed)
            for it, is_needed in zip((input, weight, bias), needed)
        ]
        assert len(saved_by(lambda: foo_ops.linear(*tensors))) == count, needed  # noqa: B023


def saved_by(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda it: it):
        function()
    return saved


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


REFUSED = {
    "integers": (
        lambda: (zeros(2, 3, dtype=torch.int64), zeros(4, 3)),
        TypeError,
        "linear: input must be float16, bfloat16, float32 or float64, got int64",
    ),
    "0-d input": (
        lambda: (zeros(), zeros(4, 3)),
        ValueError,
        "linear: input must have at least 1 dimension, got 0",
    ),
    "1-d weight": (
        lambda: (zeros(2, 3), zeros(3)),
        ValueError,
        "linear: weight must have 2 dimensions (N, K), got 1",
    ),
    "weight of another dtype": (
        lambda: (zeros(2, 3), zeros(4, 3, dtype=torch.float64)),
        TypeError,
        "linear: weight must be float32 as input is, got float64",
    ),
    "weight of another width": (
        lambda: (zeros(2, 3), zeros(4, 5)),
        ValueError,
        "linear: weight must have 3 columns as input has, got 5",
    ),
    "2-d bias": (
        lambda: (zeros(2, 3), zeros(4, 3), zeros(1, 4)),
        ValueError,
        "linear: bias must have 1 dimension (N), got 2",
    ),
    "bias of another dtype": (
        lambda: (zeros(2, 3), zeros(4, 3), zeros(4, dtype=torch.float16)),
        TypeError,
        "linear: bias must be float32 as input is, got float16",
    ),
    "bias of another length": (
        lambda: (zeros(2, 3), zeros(4, 3), zeros(3)),
        ValueError,
        "linear: bias must have 4 elements, one for each row of weight, got 3",
    ),
}
REFUSED_GATES = {
    "1-d gate": (
        lambda: (zeros(2, 3), zeros(3), zeros(4, 3)),
        ValueError,
        "linear_silu_mul: gate_weight must have 2 dimensions (N, K), got 1",
    ),
    "gate of another width": (
        lambda: (zeros(2, 3), zeros(4, 2), zeros(4, 3)),
        ValueError,
        "linear_silu_mul: gate_weight must have 3 columns as input has, got 2",
    ),
    "up of another dtype": (
        lambda: (zeros(2, 3), zeros(4, 3), zeros(4, 3, dtype=torch.float64)),
        TypeError,
        "linear_silu_mul: up_weight must be float32 as input is, got float64",
    ),
    "up of other rows": (
        lambda: (zeros(2, 3), zeros(4, 3), zeros(5, 3)),
        ValueError,
        "linear_silu_mul: up_weight must have 4 rows as gate_weight has, got 5",
    ),
    "integer input": (
        lambda: (zeros(2, 3, dtype=torch.int64), zeros(4, 3), zeros(4, 3)),
        TypeError,
        "linear_silu_mul: input must be float16, bfloat16, float32 or float64, got int64",
    ),
}
REFUSED_BACKWARD = {
    "no input": (
        lambda: (zeros(2, 4), None, zeros(4, 3)),
        ValueError,
        "linear_backward: input must be given if weight_requires_grad is true, got None",
    ),
    "no weight": (
        lambda: (zeros(2, 4), zeros(2, 3), None),
        ValueError,
        "linear_backward: weight must be given if input_requires_grad is true, got None",
    ),
    "weight of other rows": (
        lambda: (zeros(2, 4), zeros(2, 3), zeros(5, 3)),
        ValueError,
        "linear_backward: weight must have 4 rows, one for each column of grad_output, got 5",
    ),
    "input of other rows": (
        lambda: (zeros(2, 4), zeros(3, 3), zeros(4, 3)),
        ValueError,
        "linear_backward: input must have the leading dimensions [2] as grad_output has, got "
        "[3, 3]",
    ),
    "input of another width": (
        lambda: (zeros(2, 4), zeros(2, 3), zeros(4, 5)),
        ValueError,
        "linear_backward: input must have 5 columns as weight has, got 3",
    ),
    "input of another dtype": (
        lambda: (zeros(2, 4), zeros(2, 3, dtype=torch.float64), zeros(4, 3)),
        TypeError,
        "linear_backward: input must be float32 as grad_output is, got float64",
    ),
}


TABLES = (
    (torch.ops.foo.linear, REFUSED),
    (torch.ops.foo.linear_backward, REFUSED_BACKWARD),
    (torch.ops.foo.linear_silu_mul, REFUSED_GATES),
)


@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("operator", "table", "case"), [(*it, case) for it in TABLES for case in it[1]]
)
def test_refused(operator, table, case, is_fake):
    make, error, message = table[case]
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.no_grad()
    with mode, pytest.raises(error, match=f"^{re.escape(message)}$"):
        operator(*make())


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
def test_other_activations_are_refused(is_fake, is_recorded):
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext()
    message = "linear: activation must be relu, silu, gelu or gelu_tanh, got tanh"
    input = torch.zeros(2, 3, requires_grad=is_recorded)
    with mode, pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        foo_ops.linear(input, zeros(4, 3), activation="tanh")


@pytest.mark.parametrize("rows", [1, 4, 61, 300])
def test_weights_of_a_gate_may_lie_in_memory_otherwise(rows):
    input, gate, up = torch.randn(rows, 37), torch.randn(70, 37), torch.randn(37, 70).t()
    for weights in ((gate, up), (up, up), (up[::2], gate[::2])):
        expected = reference.linear_silu_mul(input.double(), *(it.double() for it in weights))
        actual = foo_ops.linear_silu_mul(input, *weights)
        assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_devices_are_not_mixed():
    message = "linear: weight must be on cpu as input is, got foo:0"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        foo_ops.linear(zeros(2, 3), zeros(4, 3, device="foo"))


# Calls each kernel with fences between the regions of its scratch memory, and checks them.
FENCED = """
import ctypes, importlib, sys
import numpy as np
import torch
from foo_ops.kernels.lang import scratch
scratch.FENCE = 1024
from foo_ops.kernels.compiler.resolve import resolve
from foo_ops.kernels.simd.types import compute_dtype

dtype, compute = sys.argv[1], compute_dtype(sys.argv[1])
layouts = {}
make = scratch.make_kernel_with_scratch
number, pointer = ctypes.c_int64, ctypes.c_void_p

for kernel in sys.argv[2:]:
    module = importlib.import_module(
        "foo_ops.kernels.linear."
        + kernel.removeprefix("linear_").partition(".")[0].removesuffix("_on_unit")
    )
    def remember(body, layout, types):
        layouts[kernel] = layout
        return make(body, layout, types)
    module.make_kernel_with_scratch = remember
    function = ctypes.CFUNCTYPE(None, *[pointer] * 4)(resolve(kernel, dtype))
    for rows, columns, depth in ((1, 70, 515), (5, 130, 33), (8, 1, 1021), (239, 65, 1030)):
        is_few = kernel.startswith("linear_few_rows")
        if is_few and rows > 8:
            continue
        left = torch.randn(rows, depth).to(getattr(torch, dtype))
        right = torch.randn(columns, depth + depth % 2).to(left.dtype)[:, :depth]
        output = torch.empty(rows, columns, dtype=left.dtype)
        block, memory = (number * 4)(0, rows, 0, columns), None
        # Which regions are used depends on how matrices lie in memory.
        apart = torch.nn.functional.pad(left.t(), (0, 1))[:, :rows].t()
        has_few_steps = kernel == "linear_few_steps"
        if has_few_steps:
            right = right.t().contiguous().t()
        for lies, is_transposed in ((apart, 0),) if has_few_steps else ((left, 0), (apart, 1)):
            second = lies if is_transposed and not is_few else right
            product = (number * 16)(
                rows, columns, depth, is_transposed, lies.data_ptr(), *lies.stride(),
                right.data_ptr(), *right.stride(), second.data_ptr(), 0, 0, 0,
                output.data_ptr(), rows if is_transposed else columns,
            )
            if memory is None:
                size = number(0)
                function(product, block, None, ctypes.addressof(size))
                memory = np.full(size.value // np.dtype(compute).itemsize, -12345.0, dtype=compute)
            function(product, block, memory.ctypes.data, None)
        # Each region was written to, at least in part. What is left between them is the fences.
        untouched = np.concatenate(([0], memory == -12345.0, [0])).astype(np.int8)
        begins, ends = (np.flatnonzero(np.diff(untouched) == step) for step in (1, -1))
        describe = layouts[kernel].describe
        regions = describe(*[1] * describe.__code__.co_argcount)
        whole = np.count_nonzero(ends - begins >= scratch.FENCE)
        assert whole == len(regions) + 1, (kernel, rows, columns, depth, whole, len(regions))
"""


KERNELS = ("linear_product", "linear_few_rows")


@pytest.mark.parametrize("finish", [".silu_mul", *whole("", ".gelu")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *whole("float64", "float16")])
def test_kernels_stay_inside_of_their_regions(dtype, finish, tmp_path):
    run(FENCED, tmp_path, dtype, *(f"{name}{finish}" for name in KERNELS))


@pytest.mark.parametrize("finish", ["", ".silu_mul"])
def test_few_rows_on_a_matrix_unit_stay_inside_of_their_regions(finish, tmp_path):
    run(FENCED, tmp_path, "bfloat16", f"linear_few_rows_on_unit{finish}", FOO_MATRIX_UNIT="1")


# Compares few rows with float64, on a matrix unit or on vectors that stand for one.
ON_UNIT = """
import itertools
import torch
import foo_ops

def check(result, exact):
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=2**-8 * depth**0.5)

torch.manual_seed(0)
for rows, (columns, depth) in itertools.product(
    (1, 2, 3, 8, 9, 15, 16, 17), ((16, 64), (70, 33), (33, 96), (5, 1), (48, 0), (520, 544), (5, 0))
):
    # Numbers beyond a column are not read.
    weights = torch.full((2, columns, depth + depth % 2 + 30), torch.nan, dtype=torch.bfloat16)
    weights[..., :depth] = torch.randn(2, columns, depth)
    weight, other = weights[..., :depth]
    bias = torch.randn(columns).bfloat16()
    apart = torch.randn(depth, rows).bfloat16().t()
    for input in (torch.randn(rows, depth + 3).bfloat16()[:, 1 : depth + 1], apart):
        exact = input.double() @ weight.double().T
        check(foo_ops.linear(input, weight), exact)
        with_bias = exact + bias.double()
        check(foo_ops.linear(input, weight, bias), with_bias)
        result = foo_ops.linear(input, weight, bias, activation="relu")
        check(result, torch.nn.functional.relu(with_bias))
        gate = torch.nn.functional.silu(exact) * (input.double() @ other.double().T)
        result = foo_ops.linear_silu_mul(input, weight, other)
        torch.testing.assert_close(result.double(), gate, rtol=2**-6, atol=2**-6 * (depth + 1))
    offsets = torch.tensor([rows - 1, rows])
    groups = torch.stack((weight, other))
    input = torch.randn(rows, depth).bfloat16()
    parts = zip(input.split([rows - 1, 1]), groups)
    exact = torch.cat([some.double() @ group.double().T for some, group in parts])
    check(foo_ops.grouped_linear(input, groups, offsets), exact)
    # Few columns are multiplied as rows are.
    many = torch.randn(300, depth).bfloat16()
    check(foo_ops.linear(many, weight[:rows]), many.double() @ weight[:rows].double().T)
"""


def test_few_rows_on_a_matrix_unit(tmp_path):
    run(ON_UNIT, tmp_path, FOO_MATRIX_UNIT="1")


@pytest.mark.parametrize("dtype", ["bfloat16", *whole("float32", "float16")])
def test_few_steps_stay_inside_of_their_regions(dtype, tmp_path):
    run(FENCED, tmp_path, dtype, "linear_few_steps")
