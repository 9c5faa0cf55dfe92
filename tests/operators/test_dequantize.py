"""The numbers of quantised weights, by kernels and by composites: foo::dequantize_int4 and more."""

from typing import Any, NamedTuple

import pytest
import torch
from support.refusals import assert_refused

import foo_ops
from foo_ops.ops import dequantize
from foo_ops.testing import reference
from foo_ops.testing.tolerance import compute_type, roundoff, smallest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMATS = ["int8", "int8 rows", "int4", "mxfp4", "table4", "fp8", "fp8 rows"]
CODES = {"int8": torch.int8}


class Call(NamedTuple):
    operator: Any
    inputs: tuple[torch.Tensor, ...]
    keywords: dict[str, Any]
    expected: torch.Tensor

    def __call__(self, *inputs):
        return self.operator(*(inputs or self.inputs), **self.keywords)


def random_codes(rows, columns, dtype):
    low, high = (-127, 128) if dtype == torch.int8 else (0, 256)
    return torch.randint(low, high, (rows, columns), dtype=dtype)


def call_of(format, dtype, rows=5, group_size=32, groups=3):
    """Return a call with random codes, and its result in float64."""
    kind, _, by_row = format.partition(" ")
    operator = getattr(torch.ops.foo, f"dequantize_{kind}").default
    width = groups * group_size
    if kind in ("int4", "mxfp4", "table4"):
        width //= 2
    codes = random_codes(rows, width, CODES.get(kind, torch.uint8))
    shape = (rows,) if by_row else (rows, groups)
    scale = torch.randn(shape, dtype=torch.float64)
    if kind == "mxfp4":
        # Subnormal powers, the largest ones, and NaN.
        exponents = torch.tensor([0, 1, 2, 100, 127, 130, 253, 254, 255], dtype=torch.uint8)
        exponents = exponents[torch.randint(0, 9, shape)]
        expected = reference.numbers_of_mxfp4(codes, exponents)
        return Call(operator, (codes, exponents), {"dtype": dtype}, expected)
    if kind in ("table4", "fp8"):
        scale, keywords = scale.to(compute_type(dtype)), {"dtype": dtype}
    else:
        scale, keywords = scale.to(dtype), {}
    wide, columns = scale.double(), scale.double() if scale.dim() == 2 else scale.double()[:, None]
    if kind == "int8":
        return Call(operator, (codes, scale), {}, reference.numbers_of_int8(codes, columns))
    if kind == "int4":
        zero = (torch.rand(shape) * 15).to(dtype)
        expected = reference.numbers_of_int4(codes, wide, zero.double(), group_size)
        return Call(operator, (codes, scale, zero), {}, expected)
    if kind == "table4":
        table = torch.randn(16, dtype=scale.dtype)
        expected = reference.numbers_of_table4(codes, wide, table.double())
        return Call(operator, (codes, scale, table), keywords, expected)
    expected = reference.numbers_of_int8(reference.numbers_of_fp8(codes), columns)
    return Call(operator, (codes, scale), keywords, expected)


def assert_rounded(found, expected):
    """Check numbers that are rounded once, after two roundings of the compute type."""
    dtype = found.dtype
    relative = roundoff(dtype) + 3 * roundoff(compute_type(dtype))
    # The bound of a sum is that of its larger term, a zero of at most 15.
    bound = relative * expected.abs().nan_to_num() + 60 * roundoff(compute_type(dtype))
    bound = bound.clamp(min=smallest(dtype))
    limited = expected.to(dtype).double()
    is_number = limited.isfinite()
    torch.testing.assert_close(
        found.double()[~is_number], limited[~is_number], rtol=0, atol=0, equal_nan=True
    )
    assert ((found.double() - expected).abs() <= bound)[is_number].all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_numbers_are_those_of_the_reference(device, dtype, format):
    for rows, group_size, groups in ((1, 32, 1), (5, 64, 3), (33, 128, 2)):
        if format == "mxfp4":
            group_size = 32
        call = call_of(format, dtype, rows, group_size, groups)
        found = call(*(it.to(device) for it in call.inputs))
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert_rounded(found.cpu(), call.expected)


COMPOSITES = {
    "int8": dequantize.int8_composite,
    "int4": dequantize.int4_composite,
    "table4": dequantize.table4_composite,
    "fp8": dequantize.fp8_composite,
}


@pytest.mark.parametrize("format", [it for it in FORMATS if it != "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_composites_have_the_same_bits(dtype, format):
    call = call_of(format, dtype, 7, 64)
    composite = COMPOSITES[format.partition(" ")[0]]
    expected = composite(*call.inputs, **call.keywords)
    torch.testing.assert_close(call(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_strided_weights(device, format):
    """Blocks of columns, as gradients have them, and rows that are columns of another tensor."""
    call = call_of(format, torch.float32, 6, 32, 4)
    codes, *others = (it.to(device) for it in call.inputs)
    half = [it[:, it.shape[1] // 2 :] if it.dim() == 2 else it for it in (codes, *others)]
    found = call(*half)
    expected = call(*(it.contiguous() for it in half))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    turned = [it.t().contiguous().t() if it.dim() == 2 else it for it in (codes, *others)]
    expected = call(codes, *others)
    torch.testing.assert_close(call(*turned), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
def test_empty_weights(format):
    for rows, groups in ((0, 3), (4, 0), (0, 0)):
        call = call_of(format, torch.bfloat16, rows, 32, groups)
        assert call().shape == (rows, 32 * groups)


def finite(inputs):
    """Replace codes and exponents that stand for NaN, and 254, which overflows."""
    return [it.clamp(max=126) if it.dtype == torch.uint8 else it for it in inputs]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_opcheck(device, format):
    call = call_of(format, torch.float64)
    inputs = tuple(it.to(device) for it in finite(call.inputs))
    with foo_ops.library.check_bounds():
        call(*inputs)
    for it in inputs:
        it.requires_grad_(it.is_floating_point())
    results = foo_ops.library.opcheck(call.operator, inputs, call.keywords)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("format", ["int8", "int8 rows", "int4", "table4", "fp8"])
def test_gradients_of_every_order(format):
    call = call_of(format, torch.float64, 2, 32, 1)
    codes, *others = finite(call.inputs)
    others = [it.requires_grad_() for it in others]

    def of_others(*others):
        return call(codes, *others)

    torch.autograd.gradcheck(of_others, others, check_forward_ad=True)
    torch.autograd.gradgradcheck(of_others, others)


@pytest.mark.parametrize("format", FORMATS)
def test_mapped_and_compiled(format):
    calls = [call_of(format, torch.float32, 3) for _ in range(2)]
    stacked = [torch.stack(it) for it in zip(*(call.inputs for call in calls))]
    expected = torch.stack([call() for call in calls])
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(torch.vmap(calls[0])(*stacked), expected, **exactly)
    compiled = torch.compile(calls[0].__call__, fullgraph=True)
    torch.testing.assert_close(compiled(*calls[1].inputs), expected[1], **exactly)


WEIGHT = torch.zeros(3, 32, dtype=torch.uint8)
SCALE = torch.ones(3, 1)
REFUSED = [
    ("int8", (WEIGHT, SCALE), TypeError, "weight must be int8 if zero is None, got uint8"),
    (
        "int8",
        (WEIGHT.char(), SCALE[:2]),
        ValueError,
        "scale must have 3 rows, one for each row of weight, got 2",
    ),
    (
        "int4",
        (WEIGHT, SCALE.expand(3, 3), SCALE.expand(3, 3)),
        ValueError,
        "scale must have a column for each 32, 64 or 128 of the 64 elements of a row, got 3",
    ),
    (
        "int4",
        (WEIGHT.char(), SCALE, SCALE),
        TypeError,
        "weight must be uint8 if zero is given, got int8",
    ),
]


@pytest.mark.parametrize(("format", "inputs", "kind", "message"), REFUSED)
def test_wrong_integers(format, inputs, kind, message):
    names = ("weight", "scale", "zero")
    operator = getattr(torch.ops.foo, f"dequantize_{format}").default
    given = dict(zip(names, inputs))
    assert_refused(operator, kind, f"dequantize_{format}: {message}", given)


REFUSED_CODES = [
    (
        "mxfp4",
        {"scale": SCALE},
        TypeError,
        "scale must be uint8, exponents of powers of two, got float32",
    ),
    (
        "mxfp4",
        {"scale": WEIGHT},
        ValueError,
        "scale must have 2 columns, one for each group of input, got 32",
    ),
    (
        "table4",
        {"scale": SCALE.half(), "table": torch.ones(16)},
        TypeError,
        "scale must be float32 for input of float32, got float16",
    ),
    (
        "table4",
        {"scale": SCALE, "table": torch.ones(15)},
        ValueError,
        "table must have 16 elements, one for each code, got 15",
    ),
    ("fp8", {"scale": SCALE[:2]}, ValueError, "scale must have 3 rows as weight has, got 2"),
    (
        "fp8",
        {"scale": SCALE.half()},
        TypeError,
        "scale must be float32 for input of float32, got float16",
    ),
]


@pytest.mark.parametrize(("format", "others", "kind", "message"), REFUSED_CODES)
def test_wrong_codes(format, others, kind, message):
    """Errors are those of the linear layer that has this format."""
    operator = getattr(torch.ops.foo, f"dequantize_{format}").default
    given = {"weight": WEIGHT, **others, "dtype": torch.float32}
    assert_refused(operator, kind, f"linear_{format}: {message}", given)
