"""Linear layers of 8 and 4 bits: sizes around those of blocks, groups, errors.

Properties of every operator are tested in test_matrix.py.
"""

import itertools
import re

import pytest
import torch
from support.parts import whole
from support.processes import run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import foo_ops
from foo_ops.ops import linear_quantized
from foo_ops.testing import (
    LINEAR_INT4,
    LINEAR_INT8,
    LINEAR_MXFP4,
    LINEAR_TABLE4,
    Sample,
    check_gradients,
    check_outputs,
    cotangents_for,
)
from foo_ops.testing.specs.linear import (
    int4_sample,
    int8_groups_sample,
    int8_sample,
    mxfp4_sample,
    table4_sample,
)

DTYPES = LINEAR_INT8.dtypes
GROUP_SIZES = (32, 64, 128)


def check(spec, dtype, sample):
    check_outputs(spec, sample, dtype, spec.call(sample))


def check_with_gradients(spec, dtype, sample):
    sample = sample.requiring_grad()
    outputs = spec.call(sample)
    cotangents = cotangents_for(outputs)
    check_outputs(spec, sample.map(torch.detach), dtype, tuple(it.detach() for it in outputs))
    gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
    check_gradients(spec, sample, gradients, cotangents)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 17])
def test_few_rows_of_int8(rows, dtype):
    for columns, depth in ((1, 1), (3, 64), (16, 31), (33, 130), (67, 515), (70, 1024)):
        check(LINEAR_INT8, dtype, int8_sample("few", (rows,), depth, columns)(dtype))


OF_GROUPS = (
    (LINEAR_INT8, int8_groups_sample),
    (LINEAR_INT4, int4_sample),
    (LINEAR_TABLE4, table4_sample),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 17])
@pytest.mark.parametrize(("spec", "make"), OF_GROUPS, ids=["int8", "int4", "table4"])
def test_few_rows_of_groups(spec, make, rows, group_size, dtype):
    for columns, groups in ((1, 1), (3, 2), (16, 5), (33, 17), (70, 9)):
        sample = make("few", (rows,), groups, columns, group_size=group_size)
        check(spec, dtype, sample(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 17])
def test_few_rows_of_mxfp4(rows, dtype):
    for columns, groups in ((1, 1), (3, 2), (16, 5), (33, 17), (70, 9)):
        check(LINEAR_MXFP4, dtype, mxfp4_sample("few", (rows,), groups, columns)(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_and_weights_that_fit_no_cache(rows, dtype):
    check(LINEAR_INT8, dtype, int8_sample("large", (rows,), 1537, 1401)(dtype))
    check(LINEAR_MXFP4, dtype, mxfp4_sample("large", (rows,), 65, 2049)(dtype))
    for spec, make in OF_GROUPS:
        check(spec, dtype, make("large", (rows,), 33, 2031, group_size=64)(dtype))


BLOCKS = ((239, 63, 128), (241, 257, 256), (9, 321, 512), (12, 255, 640), (484, 65, 384))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_those_of_blocks(dtype):
    # Gradients of scales are sums over rows and steps, and overflow float16.
    compare = check if dtype == torch.float16 else check_with_gradients
    for rows, columns, depth in BLOCKS:
        for odd in (-1, 0, 1):
            make = int8_sample("blocks", (rows,), depth + odd, columns)
            compare(LINEAR_INT8, dtype, make(dtype))
        for size, (spec, make_of) in itertools.product(GROUP_SIZES, OF_GROUPS):
            make = make_of("blocks", (rows,), depth // size, columns, group_size=size)
            compare(spec, dtype, make(dtype))
        compare(LINEAR_MXFP4, dtype, mxfp4_sample("blocks", (rows,), depth // 32, columns)(dtype))


FAR = {
    "int8": (LINEAR_INT8, int8_sample),
    "int8 with groups": (LINEAR_INT8, int8_groups_sample),
    "int4": (LINEAR_INT4, int4_sample),
    "mxfp4": (LINEAR_MXFP4, mxfp4_sample),
    "table4": (LINEAR_TABLE4, table4_sample),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("kind", FAR)
def test_rows_beyond_2_to_the_31st_element(kind, rows, dtype):
    spec, make = FAR[kind]
    sample = make("far", (rows,), 64 if make is int8_sample else 2, 3)(dtype)
    input, weight, *others = sample.inputs
    width, stride = weight.shape[1], 2**30 + 8
    memory = torch.empty(2 * stride + width, dtype=weight.dtype)
    far = memory.as_strided((3, width), (stride, 1))
    far.copy_(weight)
    (expected,) = spec.call(sample)
    (found,) = spec.call(Sample((input, far, *others), sample.keywords))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 100, 600])
def test_threads_do_not_change_the_results(rows, dtype):
    samples = (
        (LINEAR_INT8, int8_sample("threads", (rows,), 300, 1000)(dtype)),
        (LINEAR_INT8, int8_sample("threads", (rows,), 1100, 1999)(dtype)),
        (LINEAR_INT8, int8_groups_sample("threads", (rows,), 10, 1000)(dtype)),
        (LINEAR_INT4, int4_sample("threads", (rows,), 5, 1000, group_size=64)(dtype)),
        (LINEAR_INT4, int4_sample("threads", (rows,), 33, 1999, group_size=64)(dtype)),
        (LINEAR_MXFP4, mxfp4_sample("threads", (rows,), 10, 1000)(dtype)),
        (LINEAR_TABLE4, table4_sample("threads", (rows,), 5, 1000)(dtype)),
    )
    threads = torch.get_num_threads()
    for spec, sample in samples:
        found = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found += spec.call(sample)
        torch.set_num_threads(threads)
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_result_is_rounded_once():
    """In bfloat16, 256 + 1 + 1 is 258, but 257 is rounded to 256."""
    ones = torch.ones(1, 320, dtype=torch.bfloat16)
    one = ones[0, :1]
    weight = torch.zeros(1, 320, dtype=torch.int8)
    weight[0, :257] = 1
    assert foo_ops.linear_int8(ones, weight, one, one).item() == 258
    assert foo_ops.linear_int8(ones, weight, one.expand(1, 10), one).item() == 258
    nibbles = torch.zeros(1, 160, dtype=torch.uint8)
    nibbles[0, :128] = 0x11
    nibbles[0, 128] = 0x10
    scale, zero = torch.ones(1, 10, dtype=torch.bfloat16), torch.zeros(1, 10, dtype=torch.bfloat16)
    assert foo_ops.linear_int4(ones, nibbles, scale, zero, one, group_size=32).item() == 258
    codes = torch.zeros(1, 160, dtype=torch.uint8)
    codes[0, :128] = 0x22
    codes[0, 128] = 0x20
    exponents = torch.full((1, 10), 127, dtype=torch.uint8)
    assert foo_ops.linear_mxfp4(ones, codes, exponents, one).item() == 258
    table = torch.tensor([0.0, 5.0, 1.0, *[7.0] * 13])
    assert foo_ops.linear_table4(ones, codes, torch.ones(1, 10), table, one).item() == 258


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("needed", ["input", "bias", "scale"])
def test_only_what_is_needed_is_saved(needed, device):
    for make, names, operator in (
        (int8_sample("saved", (5,), 6, 4), ("input", "weight", "scale", "bias"), LINEAR_INT8),
        (
            int8_groups_sample("saved", (5,), 2, 4),
            ("input", "weight", "scale", "bias"),
            LINEAR_INT8,
        ),
        (
            int4_sample("saved", (5,), 1, 4),
            ("input", "weight", "scale", "zero", "bias"),
            LINEAR_INT4,
        ),
        (
            table4_sample("saved", (5,), 1, 4),
            ("input", "weight", "scale", "table", "bias"),
            LINEAR_TABLE4,
        ),
    ):
        sample = make(torch.float32).to(device)
        sample.inputs[names.index(needed)].requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda it: it):
            operator.call(sample)
        is_saved = any(it.data_ptr() == sample.inputs[0].data_ptr() for it in saved)
        assert is_saved == (needed == "scale")


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest result."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("operator", "make"),
    [
        (LINEAR_INT8, int8_sample("blocks", (5,), 201, 40)),
        (LINEAR_INT4, int4_sample("blocks", (5,), 7, 40)),
        (LINEAR_INT4, int4_sample("blocks", (5,), 3, 40, group_size=64)),
        (LINEAR_MXFP4, mxfp4_sample("blocks", (5,), 7, 40)),
        (LINEAR_TABLE4, table4_sample("blocks", (5,), 7, 40, group_size=32)),
    ],
    ids=["int8", "int4", "int4, 64", "mxfp4", "table4"],
)
def test_gradients_have_no_dequantized_copy(operator, make, dtype, monkeypatch):
    # Two groups of 32 numbers in a block of int4.
    monkeypatch.setattr(linear_quantized, "BLOCK", 40 * 32)
    check_with_gradients(operator, dtype, make(dtype))
    sample = make(dtype)
    sample.inputs[0].requires_grad_()
    output = operator.call(sample)
    with Largest() as largest:
        output[0].backward(torch.ones_like(output[0]))
    assert 0 < largest.elements <= 40 * 64


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_autocast(device):
    input, weight, bias = (torch.randn(it, device=device) for it in ((3, 64), (5, 64), (5,)))
    with torch.autocast(device, torch.bfloat16):
        of_int8 = foo_ops.linear_int8(input, *foo_ops.quantize_weight(weight, 8), bias)
        quantized = foo_ops.quantize_weight(weight, 4, group_size=32)
        of_int4 = foo_ops.linear_int4(input, *quantized, bias, group_size=32)
        of_mxfp4 = foo_ops.linear_mxfp4(input, *foo_ops.quantize_mxfp4(weight), bias)
        scale = torch.rand(5, 2, device=device)
        of_fp8 = foo_ops.linear_fp8(input, weight.to(torch.float8_e4m3fn), scale, bias)
        codes, table = quantized[0], torch.randn(16, device=device)
        of_table4 = foo_ops.linear_table4(input, codes, scale, table, bias)
    outputs = (of_int8, of_int4, of_mxfp4, of_fp8, of_table4)
    assert {it.dtype for it in outputs} == {torch.bfloat16}
    # Scales of float32 keep their bits.
    rows = input.bfloat16()
    assert torch.equal(of_table4, foo_ops.linear_table4(rows, codes, scale, table, bias.bfloat16()))


@pytest.mark.parametrize(("spec", "make"), OF_GROUPS, ids=["int8", "int4", "table4"])
def test_a_mapped_dimension_is_one_of_rows(spec, make):
    sample = make("vmap", (6, 3), 2, 5)(torch.float32)
    (expected,) = spec.call(sample)
    input, *others = sample.inputs
    mapped = torch.vmap(lambda it: spec.operator(it, *others, **sample.keywords), 1, 1)(input)
    assert torch.equal(mapped, expected)


def test_flops():
    with FlopCounterMode(display=False) as counter:
        LINEAR_INT8.call(int8_sample("flops", (2, 3), 64, 5)(torch.float32))
        LINEAR_INT4.call(int4_sample("flops", (2, 3), 2, 5)(torch.float32))
        LINEAR_MXFP4.call(mxfp4_sample("flops", (2, 3), 2, 5)(torch.float32))
        LINEAR_TABLE4.call(table4_sample("flops", (2, 3), 1, 5)(torch.float32))
    assert counter.get_total_flops() == 4 * (2 * 6 * 64 * 5)


# ----------------------------------------------------------------------------------------- errors


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def int8_arguments(**others):
    given = {
        "input": zeros(2, 3),
        "weight": zeros(4, 3, dtype=torch.int8),
        "scale": zeros(4),
        "bias": zeros(4),
    }
    return given | others


def int4_arguments(**others):
    given = {
        "input": zeros(2, 64),
        "weight": zeros(4, 32, dtype=torch.uint8),
        "scale": zeros(4, 2),
        "zero": zeros(4, 2),
        "bias": zeros(4),
        "group_size": 32,
    }
    return given | others


def mxfp4_arguments(**others):
    given = {
        "input": zeros(2, 64),
        "weight": zeros(4, 32, dtype=torch.uint8),
        "scale": zeros(4, 2, dtype=torch.uint8),
        "bias": zeros(4),
    }
    return given | others


REFUSED = (
    (
        lambda: mxfp4_arguments(input=zeros(2, 100)),
        ValueError,
        "linear_mxfp4: input must have whole groups of 32 columns, got 100",
    ),
    (
        lambda: mxfp4_arguments(weight=zeros(4, 32, dtype=torch.int8)),
        TypeError,
        "linear_mxfp4: weight must be uint8, got int8",
    ),
    (
        lambda: mxfp4_arguments(weight=zeros(4, 64, dtype=torch.uint8)),
        ValueError,
        "linear_mxfp4: weight must have 32 columns, one for each two columns of input, got 64",
    ),
    (
        lambda: mxfp4_arguments(scale=zeros(4, 2)),
        TypeError,
        "linear_mxfp4: scale must be uint8, exponents of powers of two, got float32",
    ),
    (
        lambda: mxfp4_arguments(scale=zeros(4, dtype=torch.uint8)),
        ValueError,
        "linear_mxfp4: scale must have 2 dimensions (N, K / 32), got 1",
    ),
    (
        lambda: mxfp4_arguments(scale=zeros(3, 2, dtype=torch.uint8)),
        ValueError,
        "linear_mxfp4: scale must have 4 rows as weight has, got 3",
    ),
    (
        lambda: mxfp4_arguments(scale=zeros(4, 3, dtype=torch.uint8)),
        ValueError,
        "linear_mxfp4: scale must have 2 columns, one for each group of input, got 3",
    ),
    (
        lambda: mxfp4_arguments(bias=zeros(3)),
        ValueError,
        "linear_mxfp4: bias must have 4 elements, one for each row of weight, got 3",
    ),
    (
        lambda: int8_arguments(input=zeros(2, 3, dtype=torch.int64)),
        TypeError,
        "linear_int8: input must be float16, bfloat16, float32 or float64, got int64",
    ),
    (
        lambda: int8_arguments(input=zeros()),
        ValueError,
        "linear_int8: input must have at least 1 dimension, got 0",
    ),
    (
        lambda: int8_arguments(weight=zeros(3, dtype=torch.int8)),
        ValueError,
        "linear_int8: weight must have 2 dimensions (N, K), got 1",
    ),
    (
        lambda: int8_arguments(weight=zeros(4, 3)),
        TypeError,
        "linear_int8: weight must be int8, got float32",
    ),
    (
        lambda: int8_arguments(weight=zeros(4, 5, dtype=torch.int8)),
        ValueError,
        "linear_int8: weight must have 3 columns as input has, got 5",
    ),
    (
        lambda: int8_arguments(scale=zeros(4, 1, 1)),
        ValueError,
        "linear_int8: scale must have 1 dimension (N) or 2 (N, K / group_size), got 3",
    ),
    (
        lambda: int8_arguments(scale=zeros(4, 1)),
        ValueError,
        "linear_int8: scale must have a column for each 32, 64 or 128 of the 3 columns of weight, "
        "got 1",
    ),
    (
        lambda: int8_arguments(scale=zeros(3, 1)),
        ValueError,
        "linear_int8: scale must have 4 rows as weight has, got 3",
    ),
    (
        lambda: int8_arguments(scale=zeros(4, 1, dtype=torch.bfloat16)),
        TypeError,
        "linear_int8: scale must be float32 as input is, got bfloat16",
    ),
    (
        lambda: int8_arguments(scale=zeros(4, dtype=torch.bfloat16)),
        TypeError,
        "linear_int8: scale must be float32 as input is, got bfloat16",
    ),
    (
        lambda: int8_arguments(scale=zeros(3)),
        ValueError,
        "linear_int8: scale must have 4 elements, one for each row of weight, got 3",
    ),
    (
        lambda: int8_arguments(bias=zeros(3)),
        ValueError,
        "linear_int8: bias must have 4 elements, one for each row of weight, got 3",
    ),
    (
        lambda: int4_arguments(group_size=16),
        ValueError,
        "linear_int4: group_size must be 32, 64 or 128, got 16",
    ),
    (
        lambda: int4_arguments(input=zeros(2, 100)),
        ValueError,
        "linear_int4: input must have whole groups of 32 columns, got 100",
    ),
    (
        lambda: int4_arguments(weight=zeros(4, 32, dtype=torch.int8)),
        TypeError,
        "linear_int4: weight must be uint8, got int8",
    ),
    (
        lambda: int4_arguments(weight=zeros(4, 64, dtype=torch.uint8)),
        ValueError,
        "linear_int4: weight must have 32 columns, one for each two columns of input, got 64",
    ),
    (
        lambda: int4_arguments(scale=zeros(4)),
        ValueError,
        "linear_int4: scale must have 2 dimensions (N, K / group_size), got 1",
    ),
    (
        lambda: int4_arguments(scale=zeros(3, 2)),
        ValueError,
        "linear_int4: scale must have 4 rows as weight has, got 3",
    ),
    (
        lambda: int4_arguments(zero=zeros(4, 1)),
        ValueError,
        "linear_int4: zero must have 2 columns, one for each group of input, got 1",
    ),
    (
        lambda: int4_arguments(zero=zeros(4, 2, dtype=torch.uint8)),
        TypeError,
        "linear_int4: zero must be float32 as input is, got uint8",
    ),
    (
        lambda: int4_arguments(bias=zeros(4, dtype=torch.float16)),
        TypeError,
        "linear_int4: bias must be float32 as input is, got float16",
    ),
    (
        lambda: int8_arguments(activations=4),
        ValueError,
        "linear_int8: activations must be None or 8, got 4",
    ),
    (
        lambda: int4_arguments(activations=16),
        ValueError,
        "linear_int4: activations must be None or 8, got 16",
    ),
    (
        lambda: int8_arguments(
            input=zeros(2, 3, dtype=torch.float64),
            scale=zeros(4, dtype=torch.float64),
            bias=None,
            activations=8,
        ),
        TypeError,
        "linear_int8: input must be float16, bfloat16 or float32 for activations of 8 bits, "
        "got float64",
    ),
    (
        lambda: int4_arguments(by_section=True),
        ValueError,
        "linear_int4: by_section must be False without activations, got True",
    ),
    (
        lambda: int8_arguments(activations=8, by_section=True),
        ValueError,
        "linear_int8: by_section must be False for weights without groups, got True",
    ),
)


@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[it[2] for it in REFUSED])
def test_refused(make, error, message, is_fake):
    operator = getattr(foo_ops, message.partition(":")[0])
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.no_grad()
    with mode, pytest.raises(error, match=f"^{re.escape(message)}$"):
        operator(**make())


def test_devices_are_not_mixed():
    weight = zeros(4, 3, dtype=torch.int8, device="foo")
    message = "linear_int8: weight must be on cpu as input is, got foo:0"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        foo_ops.linear_int8(**int8_arguments(weight=weight))


# Calls each kernel with fences between the regions of its scratch memory, and checks them.
FENCED = """
import ctypes, sys
import numpy as np
import torch
from foo_ops.kernels.lang import scratch
scratch.FENCE = 1024
from foo_ops.kernels.compiler.resolve import resolve
from foo_ops.kernels.linear import few_rows, product
from foo_ops.kernels.simd.types import compute_dtype

dtype, compute = sys.argv[1], compute_dtype(sys.argv[1])
make, layouts = scratch.make_kernel_with_scratch, []
number, pointer = ctypes.c_int64, ctypes.c_void_p

def remember(body, layout, types):
    layouts.append(layout)
    return make(body, layout, types)

few_rows.make_kernel_with_scratch = product.make_kernel_with_scratch = remember
for kernel in ("linear_int8_product", "linear_int8_few_rows", "linear_int4_product",
               "linear_int8_product.groups", "linear_int8_few_rows.64",
               *(f"linear_int4_few_rows.{size}" for size in (32, 64, 128))):
    function = ctypes.CFUNCTYPE(None, *[pointer] * 4)(resolve(kernel, dtype))
    is_int4, is_few, member = "int4" in kernel, "few" in kernel, kernel.rpartition(".")[2]
    has_groups, size = is_int4 or "." in kernel, int(member) if member.isdigit() else 64
    for rows, columns, groups in ((1, 70, 9), (5, 130, 1), (8, 1, 17), (239, 65, 11)):
        if is_few and rows > 8:
            continue
        depth = groups * size if has_groups else groups * size + 3
        left = torch.randn(rows, depth).to(getattr(torch, dtype))
        right = torch.randint(0, 256, (columns, depth // 2 if is_int4 else depth)).byte()
        scale, zero = torch.ones(2, columns, groups).to(left.dtype)
        output = torch.empty(rows, columns, dtype=left.dtype)
        block, memory = (number * 4)(0, rows, 0, columns), None
        # Which regions are used depends on how matrices lie in memory.
        apart = torch.nn.functional.pad(left.t(), (0, 1))[:, :rows].t()
        for lies, is_transposed in ((left, 0), (apart, 1)):
            arguments = (number * 21)(
                rows, columns, depth, is_transposed, lies.data_ptr(), *lies.stride(),
                right.data_ptr(), *right.stride(), 0, 0, 0, 0, output.data_ptr(),
                rows if is_transposed else columns, scale.data_ptr(), groups,
                zero.data_ptr(), groups, size,
            )
            if memory is None:
                bytes = number(0)
                function(arguments, block, None, ctypes.addressof(bytes))
                memory = np.full(bytes.value // np.dtype(compute).itemsize, -12345.0, dtype=compute)
            function(arguments, block, memory.ctypes.data, None)
        # Each region was written to, at least in part. What is left between them is the fences.
        untouched = np.concatenate(([0], memory == -12345.0, [0])).astype(np.int8)
        begins, ends = (np.flatnonzero(np.diff(untouched) == step) for step in (1, -1))
        describe = layouts[-1].describe
        described = describe(*[1] * describe.__code__.co_argcount)
        # A name in the place of a count is that of a region that it shares.
        regions = [name for name, count in described.items() if not isinstance(count, str)]
        whole = np.count_nonzero(ends - begins >= scratch.FENCE)
        assert whole == len(regions) + 1, (kernel, rows, columns, depth, whole, regions)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", *whole("float32", "float64", "float16")])
def test_kernels_stay_inside_of_their_regions(dtype, tmp_path):
    run(FENCED, tmp_path, dtype)
