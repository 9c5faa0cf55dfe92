"""Sizes and offsets beyond 2^31 and 2^63: right, or refused with one error.

Memory is mapped but hardly touched, so that tensors may be as far apart in it as in tensors of
terabytes.
"""

import ctypes
import mmap
import time

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near
from torch._subclasses import FakeTensorMode

import foo_ops
from foo_ops import _C
from foo_ops.kernels.compiler.resolve import resolve
from foo_ops.testing import OPERATORS
from foo_ops.testing.reference import numbers_of_table4

FAR = 2**31 + 64
"""Elements from one row to the next: beyond 32 bits in bytes and in elements."""
MAP_NORESERVE = 0x4000


def untouched(elements, dtype):
    """Return ``elements`` zeros, which take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"the system reserves memory that nobody touches: {error}")
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def spread(tensor):
    """Place the slices of a tensor's first dimension far apart in memory."""
    dimension = next((i for i, size in enumerate(tensor.shape) if size > 1), None)
    if dimension is None or 0 in tensor.shape:
        return tensor.clone()
    strides = list(tensor.contiguous().stride())
    strides[dimension] = FAR
    elements = (tensor.shape[dimension] - 1) * FAR + tensor.numel()
    result = untouched(elements, tensor.dtype).as_strided(tensor.shape, strides)
    return result.copy_(tensor)


@pytest.mark.parametrize("spec", [it for it in OPERATORS if it.functional is None], ids=str)
def test_parts_that_are_far_apart(spec):
    """Operators read their inputs and write their arguments, however far apart the parts are."""
    for name in spec.essential:
        torch.manual_seed(0)
        near = spec.samples[name](torch.float32)
        far = near.map(spread)
        expected, results = near.call(spec.operator), far.call(spec.operator)
        for result, other in zip((*results, *far.tensors()), (*expected, *near.tensors())):
            torch.testing.assert_close(result, other, equal_nan=True)


# --------------------------------------------------------------------------------- linear kernels


def fields_of(name):
    """Return the offsets of a C++ struct's fields, including those of a nested product."""
    found = {}
    for field, type_, offset in _C.agreement()["structs"][name]:
        inner = fields_of(type_) if type_ == "Product" else {field: 0}
        found |= {key: offset + place for key, place in inner.items()}
    return found


def call_kernel(kernel, dtype, struct, block, **values):
    """Call a kernel of linear layers on one block of a product."""
    offsets = fields_of(struct)
    product = (ctypes.c_int64 * len(offsets))()
    for name, value in values.items():
        product[offsets[name] // 8] = value.data_ptr() if isinstance(value, torch.Tensor) else value
    function = ctypes.CFUNCTYPE(None, *([ctypes.c_void_p] * 4))(resolve(kernel, dtype))
    count, place = ctypes.c_int64(), (ctypes.c_int64 * 4)(*block)
    function(product, place, None, ctypes.byref(count))
    scratch = ctypes.create_string_buffer(count.value + 64)
    aligned = ctypes.c_void_p(-(-ctypes.addressof(scratch) // 64) * 64)
    function(product, place, aligned, None)


ROWS = 2**16
TABLE = torch.linspace(-1, 1, 16)
KERNELS = {
    "linear_product": (16, None),
    "linear_few_rows": (4, None),
    "linear_int8_product": (16, "int8"),
    "linear_int8_few_rows": (4, "int8"),
    "linear_int4_product": (16, "int4"),
    "linear_int4_few_rows.32": (4, "int4"),
    "linear_mxfp4_product": (16, "mxfp4"),
    "linear_mxfp4_few_rows": (4, "mxfp4"),
    "linear_table4_product": (16, "table4"),
    "linear_table4_few_rows.32": (4, "table4"),
}


def stored_and_wide(weight, stored):
    if stored is None:
        return (weight,), weight
    if stored == "mxfp4":
        parts = foo_ops.quantize_mxfp4(weight)
        return parts, foo_ops.dequantize_mxfp4(*parts)
    if stored == "table4":
        codes = torch.randint(256, (len(weight), weight.shape[1] // 2), dtype=torch.uint8)
        scale = torch.rand(len(weight), weight.shape[1] // 32)
        return (codes, scale), numbers_of_table4(codes, scale, TABLE)
    parts = foo_ops.quantize_weight(weight, *((8,) if stored == "int8" else (4, 32)))
    return parts, foo_ops.dequantize_weight(*parts)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_last_block_of_a_large_product(kernel):
    """Rows times outputs, weights in bytes, and input elements each exceed 2^32."""
    rows, stored = KERNELS[kernel]
    depth, outputs, columns = 2**17, 2**17, 48
    torch.manual_seed(0)
    input, weight = torch.randn(rows, depth), torch.randn(columns, depth)
    parts, wide = stored_and_wide(weight, stored)
    first, column = ROWS - rows, outputs - columns
    right_stride = parts[0].shape[1]
    all_of_input = untouched(ROWS * depth, torch.float32)
    all_of_input[first * depth :] = input.flatten()
    all_of_weight = untouched(outputs * right_stride, parts[0].dtype)
    all_of_weight[column * right_stride :] = parts[0].flatten()
    output = untouched(ROWS * outputs, torch.float32)
    values = {}
    for name, part in zip(("scale", "zero"), parts[1:]):
        stride = part.stride(0)
        values[name] = untouched(outputs * stride, part.dtype)
        values[name][column * stride :] = part.flatten()
        values[f"{name}_column_stride"] = stride
    if stored in ("int4", "mxfp4", "table4"):
        values |= {"group_size": 32, "table": TABLE}
    call_kernel(
        kernel, "float32", "Product" if stored is None else "QuantizedProduct",
        (first, ROWS, column, outputs), rows=ROWS, columns=outputs, depth=depth, left=all_of_input,
        left_row_stride=depth, left_step_stride=1, right=all_of_weight,
        right_column_stride=right_stride, right_step_stride=1, output=output,
        output_stride=outputs, **values,
    )  # fmt: skip
    result = output.view(ROWS, outputs)[first:, column:]
    assert_near(result, input.double() @ wide.double().mT, roundings=2**9)


def test_a_layer_of_more_than_two_gigabytes():
    """One row times a weight of more than 2^31 bytes, in which only the last rows are not zero."""
    depth, outputs = 2**16, 2**15 + 8
    weight = untouched(outputs * depth, torch.int8).view(outputs, depth)
    weight[-3:] = torch.randint(-127, 128, (3, depth), dtype=torch.int8)
    input, scale = torch.randn(1, depth), torch.rand(outputs)
    result = foo_ops.linear_int8(input, weight, scale)
    assert result[0, :-3].abs().max() == 0
    exact = F.linear(input.double(), weight[-3:].double()) * scale[-3:].double()
    assert_near(result[:, -3:], exact, roundings=2**9)


# ------------------------------------------------------------------------------------------ fakes

LONG = 2**32


def attention_gradients(device):
    tensors = [torch.empty(2, 2, LONG, 64, dtype=torch.bfloat16, device=device) for _ in range(3)]
    bias = torch.empty(1, 1, 1, LONG, dtype=torch.bfloat16, device=device)
    inputs = [it.requires_grad_() for it in (*tensors, bias)]
    output, _ = foo_ops.attention(*inputs)
    return torch.autograd.grad(output, inputs, torch.empty_like(output))


def varlen(device):
    packed = [torch.empty(2 * LONG, 1, 64, device=device) for _ in range(3)]
    starts = torch.empty(3, dtype=torch.int32, device=device)
    return foo_ops.attention_varlen(
        *packed, starts, starts, max_seqlen_q=2 * LONG, max_seqlen_k=2 * LONG
    )


def losses(device):
    hidden, weight = (torch.empty(2**40, 1, device=device).requires_grad_() for _ in range(2))
    target = torch.empty(2**40, dtype=torch.int64, device=device)
    loss = foo_ops.linear_cross_entropy(hidden, weight, target)
    return torch.autograd.grad(loss, (hidden, weight))


RIGHT = {
    attention_gradients: [(2, 2, LONG, 64)] * 3 + [(1, 1, 1, LONG)],
    varlen: [(2 * LONG, 1, 64)],
    losses: [(2**40, 1)] * 2,
    "linear_int8": [(2**17, 2**16)],
    "linear_int4": [(2**17, 2**16)],
    "softmax_cross_entropy": [()],
    "silu_mul": [(2**30, 2**29)],
    "quantize_weight": [(2**26, 2**13), (2**26,)],
}


def call_by_name(name, device, *sizes):
    """Call an operator with empty tensors of the given sizes, each with a dtype if not float32."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    rows, outputs = sizes
    input = empty(rows, 32)
    return {
        "linear": lambda: foo_ops.linear(input, empty(outputs, 32)),
        "linear_activation": lambda: foo_ops.linear(input, empty(outputs, 32), activation="silu"),
        "linear_silu_mul": lambda: foo_ops.linear_silu_mul(input, *[empty(outputs, 32)] * 2),
        "linear_int8": lambda: foo_ops.linear_int8(
            input, empty(outputs, 32, dtype=torch.int8), empty(outputs)
        ),
        "linear_int4": lambda: foo_ops.linear_int4(
            input, empty(outputs, 16, dtype=torch.uint8), *[empty(outputs, 1)] * 2, group_size=32
        ),
        "silu_mul": lambda: foo_ops.silu_mul(*[empty(rows, outputs)] * 2),
        "softmax_cross_entropy": lambda: foo_ops.softmax_cross_entropy(
            empty(rows, outputs), empty(rows, dtype=torch.int64)
        ),
        "quantize_weight": lambda: foo_ops.quantize_weight(empty(rows, outputs), 8),
    }[name]()


SIZES = {
    "linear_int8": (2**17, 2**16), "linear_int4": (2**17, 2**16), "silu_mul": (2**30, 2**29),
    "softmax_cross_entropy": (2**30, 2**29), "quantize_weight": (2**26, 2**13),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", RIGHT, ids=lambda it: it if isinstance(it, str) else it.__name__)
def test_sizes_without_memory(case, device):
    """Fakes return at once, however large the results, even with more than 2^63 scores."""
    start = time.monotonic()
    with FakeTensorMode():
        results = call_by_name(case, device, *SIZES[case]) if case in SIZES else case(device)
    results = results if isinstance(results, tuple) else (results,)
    assert [tuple(it.shape) for it in results] == RIGHT[case]
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    "name", ["linear", "linear_activation", "linear_silu_mul", "linear_int8", "linear_int4"]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_results_that_no_address_reaches(name, device):
    """PyTorch's own error gives the sizes of a result of more than 2^63 bytes."""
    sizes = (2**32, 2**31)
    with FakeTensorMode(), pytest.raises(RuntimeError) as caught:
        call_by_name(name, device, *sizes)
    assert str(caught.value).startswith("Storage size calculation overflowed with sizes=[4294967")
