"""Linear layers that round their rows to 8 bits: sizes around those of blocks, extremes, scratch.

Properties of every operator are tested in test_matrix.py.
"""

import pytest
import torch
from support.parts import whole
from support.processes import run

import foo_ops
from foo_ops.ops import linear_quantized
from foo_ops.testing import (
    LINEAR_INT4_ACTIVATIONS,
    LINEAR_INT8_ACTIVATIONS,
    check_gradients,
    check_outputs,
    cotangents_for,
)
from foo_ops.testing.specs.linear import (
    gate_of,
    int4_sample,
    int8_groups_sample,
    int8_sample,
    rounded,
    rounded_by_section,
)

DTYPES = LINEAR_INT8_ACTIVATIONS.dtypes
GROUP_SIZES = (32, 64, 128)
OF_GROUPS = (
    (LINEAR_INT8_ACTIVATIONS, int8_groups_sample),
    (LINEAR_INT4_ACTIVATIONS, int4_sample),
)
MANY_ROWS = 33


def check(spec, dtype, sample):
    check_outputs(spec, sample, dtype, spec.call(sample))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 17])
def test_sizes_of_int8(rows, dtype):
    for columns, depth in ((1, 1), (3, 64), (16, 31), (33, 130), (67, 515), (70, 1024)):
        check(
            LINEAR_INT8_ACTIVATIONS,
            dtype,
            rounded(int8_sample("few", (rows,), depth, columns))(dtype),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("spec", "make"), OF_GROUPS, ids=["int8", "int4"])
def test_sizes_of_groups(spec, make, group_size, dtype):
    for rows in (1, 2, 5, 8, 9, 45):
        for columns, groups in ((1, 1), (7, 3), (33, 5), (70, 17)):
            sample = rounded(make("groups", (rows,), groups, columns, group_size=group_size))
            check(spec, dtype, sample(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("spec", "make"), OF_GROUPS, ids=["int8", "int4"])
def test_sizes_of_sections(spec, make, group_size, dtype):
    """A section has 4 to 16 groups; the last one may have fewer."""
    for rows in (1, 2, 9, 45):
        for columns, groups in ((1, 1), (7, 3), (33, 5), (70, 17)):
            make_sample = make("sections", (rows,), groups, columns, group_size=group_size)
            check(spec, dtype, rounded_by_section(make_sample)(dtype))


def test_a_section_has_one_scale():
    """A large number makes zeros of the others in its section, and of no others."""
    input, weight = torch.ones(3, 1024), torch.full((2, 1024), 64, dtype=torch.int8)
    input[0, 7], scale = 1000.0, torch.ones(2, 32)
    found = foo_ops.linear_int8(input, weight, scale, activations=8, by_section=True)
    weight_of_8_bits = torch.tensor(64.0 * 127 / 128).round() * 128 / 127
    expected = torch.tensor([1000.0 + 512, 1024, 1024]).mul(weight_of_8_bits)[:, None].expand(3, 2)
    torch.testing.assert_close(found, expected)
    # So does a group of large weights: the others are below half a step.
    scale[1, 3] = 1000.0
    found = foo_ops.linear_int8(input[1:], weight, scale, activations=8, by_section=True)
    of_second = (1000.0 * 32 + 512) * weight_of_8_bits
    expected = torch.stack((1024 * weight_of_8_bits, of_second)).expand(2, 2)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_of_sections(bits):
    """As the manual states it for normal numbers; rows of one scale have an error of 0.9 %."""
    torch.manual_seed(0)
    input, weight = torch.randn(64, 2048), torch.randn(64, 2048)
    quantized = foo_ops.quantize_weight(weight, bits, 64)
    multiply, sizes = (
        (foo_ops.linear_int8, {}) if bits == 8 else (foo_ops.linear_int4, {"group_size": 64})
    )
    exact = input.double() @ foo_ops.dequantize_weight(*quantized).double().T
    errors = [
        (multiply(input, *quantized, **sizes, activations=8, by_section=it) - exact).norm()
        / exact.norm()
        for it in (False, True)
    ]
    assert errors[0] < 0.007
    assert 0.007 < errors[1] < 0.012


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_weights_that_fit_no_cache(rows, dtype):
    sample = rounded(int8_sample("large", (rows,), 1537, 1401))
    check(LINEAR_INT8_ACTIVATIONS, dtype, sample(dtype))
    for spec, make in OF_GROUPS:
        sample = rounded(make("large", (rows,), 33, 2031, group_size=64))
        check(spec, dtype, sample(dtype))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, MANY_ROWS])
@pytest.mark.parametrize("weight_of", [-128, 127])
@pytest.mark.parametrize("sign", [-1, 1])
def test_largest_integers(sign, weight_of, rows):
    """No sum of products saturates: all of them have the largest magnitude, and one sign."""
    depth, columns = 5000, 21
    input = torch.full((rows, depth), sign * 127.0)
    weight = torch.full((columns, depth), weight_of, dtype=torch.int8)
    result = foo_ops.linear_int8(input, weight, torch.ones(columns), activations=8)
    exact = torch.tensor(float(sign * 127 * weight_of * depth), dtype=torch.float64)
    # The sum has more bits than float32.
    torch.testing.assert_close(result.double(), exact.expand(rows, columns), rtol=2**-22, atol=0)
    # Integers of 4 bits, whose zero is beyond them; their difference is a byte with a sign or not.
    pairs = torch.full((columns, 64 * 40 // 2), 0xFF, dtype=torch.uint8)
    scale, input = torch.ones(columns, 40), torch.full((rows, 64 * 40), sign * 127.0)
    for zero in (-64, -120, -240):
        zeros = torch.full((columns, 40), float(zero))
        result = foo_ops.linear_int4(input, pairs, scale, zeros, group_size=64, activations=8)
        assert torch.equal(
            result, torch.full((rows, columns), sign * 127.0 * (15 - zero) * 64 * 40)
        )


@pytest.mark.parametrize("rows", [1, MANY_ROWS])
def test_integers_are_exact(rows):
    """Rows of integers up to 127, with 127 among them, are not rounded."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randint(-127, 128, (rows, 640), generator=generator).float()
    input[:, ::32] = 127
    weight = torch.randint(-128, 128, (50, 640), generator=generator, dtype=torch.int8)
    expected = (input.double() @ weight.double().T).float()
    for scale in (torch.ones(50), torch.ones(50, 20), torch.ones(50, 5)):
        assert torch.equal(foo_ops.linear_int8(input, weight, scale, activations=8), expected)


@pytest.mark.parametrize("rows", [1, MANY_ROWS])
def test_ties_are_rounded_to_even(rows):
    """127 steps of 2: 1 and 3 are ties, as 0.5 and 1.5."""
    input = torch.tensor([254.0, 1.0, 3.0, -1.0, -3.0, 5.0]).expand(rows, 6)
    weight = torch.eye(6, dtype=torch.int8)
    result = foo_ops.linear_int8(input, weight, torch.ones(6), activations=8)
    assert torch.equal(result, torch.tensor([254.0, 0.0, 4.0, 0.0, -4.0, 4.0]).expand(rows, 6))


@pytest.mark.parametrize("rows", [1, MANY_ROWS])
def test_a_long_row(rows):
    """A row of more products than 32 bits hold the sum of."""
    depth = 2**18 + 5
    input = torch.full((rows, depth), 127.0)
    weight = torch.full((3, depth), -128, dtype=torch.int8)
    result = foo_ops.linear_int8(input, weight, torch.ones(3), activations=8)
    exact = torch.tensor(-127.0 * 128 * depth, dtype=torch.float64).expand(rows, 3)
    torch.testing.assert_close(result.double(), exact, rtol=2**-20, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spec", "make"),
    [(LINEAR_INT8_ACTIVATIONS, rounded(int8_sample("gradients", (2, 3), 65, 9)))]
    + [
        (spec, how(make("gradients", (2, 3), 19, 9)))
        for how in (rounded, rounded_by_section)
        for spec, make in OF_GROUPS
    ],
    ids=["int8", "int8 groups", "int4", "int8 sections", "int4 sections"],
)
def test_gradients(spec, make, dtype):
    """The rounding lets the gradient pass; scales have that of the rounded rows."""
    sample = make(dtype).requiring_grad()
    outputs = spec.call(sample)
    cotangents = cotangents_for(outputs)
    gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
    check_gradients(spec, sample, gradients, cotangents)


@pytest.mark.parametrize(
    ("spec", "make"),
    [(LINEAR_INT8_ACTIVATIONS, rounded(int8_sample("tangents", (3,), 65, 9)))]
    + [
        (spec, how(make("tangents", (3,), 19, 9)))
        for how in (rounded, rounded_by_section)
        for spec, make in OF_GROUPS
    ],
    ids=["int8", "int8 groups", "int4", "int8 sections", "int4 sections"],
)
def test_tangents(spec, make):
    sample = make(torch.float32)
    input, *others = sample.inputs
    tangent = torch.randn_like(input)

    def call(rows):
        return spec.operator(rows, *others, **sample.keywords)

    output, found = torch.func.jvp(call, (input,), (tangent,))
    unrounded = {key: it for key, it in sample.keywords.items() if key == "group_size"}
    wide = [it.double() if it.is_floating_point() else it for it in others]
    zero = [torch.zeros_like(wide[-1])]
    expected = spec.reference(tangent.double(), *wide[:-1], *zero, **unrounded)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output, call(input), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("how", [rounded, rounded_by_section])
@pytest.mark.parametrize(("spec", "make"), OF_GROUPS, ids=["int8", "int4"])
def test_derivatives_agree_forward_and_backward(spec, make, how, is_gated):
    """All floating-point arguments are differentiated, along random tangents and cotangents."""
    sample, operator = how(make("both", (3,), 19, 10, has_bias=False))(torch.float32), spec.operator
    if is_gated:
        sample = gate_of(lambda _: sample)(torch.float32)
        operator = torch.ops.foo.linear_silu_mul_quantized.default
    numbers = [it for it in sample.inputs if it.is_floating_point()]
    tangents = tuple(torch.randn_like(it) for it in numbers)

    def call(input, *factors):
        return operator(input, sample.inputs[1], *factors, **sample.keywords)

    output, forward = torch.func.jvp(call, tuple(numbers), tangents)
    cotangent = torch.randn_like(output)
    _, pull = torch.func.vjp(call, *numbers)
    backward = sum((a * b).sum() for a, b in zip(pull(cotangent), tangents, strict=True))
    torch.testing.assert_close((forward * cotangent).sum(), backward, rtol=1e-4, atol=1e-3)


def test_a_row_of_one_scale_is_not_sharded():
    """The scale is that of all steps; `tests/distributed` computes in float64, which is refused."""
    rows, weight = torch.ones(2, 64), torch.ones(3, 64, dtype=torch.int8)
    of_rows, of_groups = torch.ones(3), torch.ones(3, 2)
    sharded = linear_quantized.int8_sharding
    assert sharded(rows, weight, of_rows) == "... k, n k, n, . -> ... n"
    assert sharded(rows, weight, of_rows, activations=8) == "... ., n ., n, . -> ... n"
    assert sharded(rows, weight, of_groups, activations=8) == "... k, n k, n k, . -> ... n"
    by_section = {"activations": 8, "by_section": True}
    assert sharded(rows, weight, of_groups, **by_section) == "... ., n ., n ., . -> ... n"
    of_int4 = linear_quantized.int4_sharding(rows, weight, of_groups, of_groups, **by_section)
    assert of_int4 == "... ., n ., n ., n ., . -> ... n"


# Calls each kernel with fences between the regions of its scratch memory, and checks them.
FENCED = """
import ctypes, sys
import numpy as np
import torch
from foo_ops.kernels.lang import scratch
scratch.FENCE = 1024
from foo_ops.kernels.compiler.resolve import resolve
from foo_ops.kernels.linear import few_rows, integer

dtype = sys.argv[1]
make, layouts = scratch.make_kernel_with_scratch, []
number, pointer = ctypes.c_int64, ctypes.c_void_p

def remember(body, layout, types):
    layouts.append(layout)
    return make(body, layout, types)

few_rows.make_kernel_with_scratch = integer.make_kernel_with_scratch = remember

def call_with_fences(kernel, function, arguments, block, what):
    bytes = number(0)
    function(arguments, block, None, ctypes.addressof(bytes))
    memory = np.full(bytes.value // 4, -12345.0, dtype="float32")
    function(arguments, block, memory.ctypes.data, None)
    # Each region was written to, at least in part. What is left between them is the fences.
    untouched = np.concatenate(([0], memory == -12345.0, [0])).astype(np.int8)
    begins, ends = (np.flatnonzero(np.diff(untouched) == step) for step in (1, -1))
    describe = layouts[-1].describe
    described = describe(*[1] * describe.__code__.co_argcount)
    written = np.count_nonzero(ends - begins >= scratch.FENCE)
    names = [name for name in described if name not in what]
    assert written == len(names) + 1, (kernel, written, names, block[:])

for kernel in ("integer_few_rows.int8", "integer_product.int8", "integer_product.int4",
               "integer_product.int8.silu_mul", "integer_product.int4.silu_mul",
               *(f"integer_few_rows.{bits}.{size}" for bits in ("int8", "int4")
                 for size in (32, 64, 128))):
    function = ctypes.CFUNCTYPE(None, *[pointer] * 4)(resolve(kernel, dtype))
    is_int4, is_few, member = "int4" in kernel, "few" in kernel, kernel.rpartition(".")[2]
    has_groups, size = is_int4 or member.isdigit(), int(member) if member.isdigit() else 64
    for rows, columns, groups in ((1, 70, 9), (5, 130, 1), (8, 1, 17), (239, 65, 33)):
        if is_few and rows > 8:
            continue
        depth = groups * size if has_groups else groups * size + 3
        padded, sections = -(-rows // 32) * 32, -(-depth // 512)
        left = torch.randn(rows, depth).to(getattr(torch, dtype))
        if not is_few:
            left = torch.zeros(sections, padded, 512, dtype=torch.int8)
        stride = left.stride(0) if is_few else 512
        # A gate has the columns of two products.
        width = columns * (2 if member == "silu_mul" else 1)
        # Groups are multiplied by themselves, or by section.
        cuts = (size, 512) if has_groups and not is_few else (512,)
        right = torch.randint(0, 256, (width, depth // 2 if is_int4 else depth)).byte()
        scale, zero = torch.ones(2, width, groups).to(getattr(torch, dtype))
        factors = torch.ones(max(sections, groups), padded)
        output = torch.empty(rows, columns, dtype=getattr(torch, dtype))
        # Many rows pack columns by squares; one vector holds the rest of a line.
        unused = (*["square"] * is_few, *["rest"] * (columns % 16 == 0))
        for cut in cuts:
            arguments = (number * 26)(
                rows, columns, depth, 0, left.data_ptr(), stride, 1, right.data_ptr(),
                *right.stride(), 0, 0, 0, 0, output.data_ptr(), columns, scale.data_ptr(), groups,
                zero.data_ptr(), groups, size if has_groups else 0, 0, cut, padded,
                factors.data_ptr(), factors.data_ptr(),
            )
            call_with_fences(kernel, function, arguments, (number * 4)(0, rows, 0, columns), unused)

function = ctypes.CFUNCTYPE(None, *[pointer] * 4)(resolve("integer_rows", dtype))
for depth, size in ((515, 0), (960, 32), (704, 64), (704, 512)):
    source = torch.randn(5, depth).to(getattr(torch, dtype))
    integers = torch.zeros(2, 32, 512, dtype=torch.uint8)
    factors = torch.zeros(2, 30, 32)
    arguments = (number * 10)(
        5, depth, source.data_ptr(), depth, size, 512, 32, integers.data_ptr(),
        factors[0].data_ptr(), factors[1].data_ptr(),
    )
    call_with_fences("integer_rows", function, arguments, (number * 4)(0, 5, 0, 0), ())
"""


@pytest.mark.parametrize("dtype", ["float32", *whole("bfloat16", "float16")])
def test_kernels_stay_inside_of_their_regions(dtype, tmp_path):
    run(FENCED, tmp_path, dtype)


# Behind each tensor begins a page that must not be read.
AT_THE_END = """
import ctypes, mmap
import torch
import foo_ops

PAGES, PAGE = 16, mmap.PAGESIZE

def at_end(tensor):
    memory = mmap.mmap(-1, PAGES * PAGE)
    last = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + (PAGES - 1) * PAGE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(last), ctypes.c_size_t(PAGE), 0) == 0
    place = (PAGES - 1) * PAGE - tensor.nbytes
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
    return copy.view(tensor.shape).copy_(tensor)

for rows in (3, 70):
    for columns in (1, 16, 48):
        for depth in (32, 96, 160):
            input, weight = torch.randn(rows, depth), torch.randn(columns, depth)
            for bits, group_size, by_section in (
                (8, None, False), (8, 32, True), (4, 32, False), (4, 32, True)
            ):
                integers = foo_ops.quantize_weight(weight, bits, group_size=group_size)
                multiply = foo_ops.linear_int8 if bits == 8 else foo_ops.linear_int4
                rounding = {"activations": 8, "by_section": by_section}
                options = {**rounding, **({"group_size": 32} if bits == 4 else {})}
                found = multiply(*map(at_end, (input, *integers)), **options)
                assert torch.equal(found, multiply(input, *integers, **options))
                if columns % 2 == 0:
                    gate = foo_ops.linear_silu_mul_quantized
                    found = gate(*map(at_end, (input, *integers)), **rounding)
                    assert torch.equal(found, gate(input, *integers, **rounding))
"""


def test_nothing_behind_tensors_is_read(tmp_path):
    run(AT_THE_END, tmp_path)
