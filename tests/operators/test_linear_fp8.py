"""foo::linear_fp8: its codes, its errors, and weights as checkpoints have them.

test_matrix.py has what holds for every operator.
"""

import pytest
import torch
from support.exact import assert_near
from support.refusals import assert_refused

import foo_ops
from foo_ops.ops.dequantize import decoded_fp8
from foo_ops.testing import reference

FLOAT8 = torch.float8_e4m3fn
CODES = torch.arange(256, dtype=torch.uint8)


def test_numbers_are_those_of_pytorch():
    expected = CODES.view(FLOAT8).float()
    torch.testing.assert_close(decoded_fp8(CODES), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        reference.numbers_of_fp8(CODES).float(), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_each_code_is_multiplied_as_its_number(device, dtype, group_size, rows):
    """One element of a row is 1 and all others are 0, so that an output is a weight."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    codes = CODES.reshape(16, 16).repeat(1, 2)
    scale = torch.ones((16,) if group_size is None else (16, 1), dtype=wide)
    for column in range(0, 32, 5):
        input = torch.zeros(rows, 32, dtype=dtype)
        input[:, column] = 1
        # NaN times 0 is NaN, and these codes are in one row.
        weight = torch.where(codes % 128 == 127, 0, codes).to(torch.uint8)
        output = foo_ops.linear_fp8(*(it.to(device) for it in (input, weight, scale)))
        expected = weight[:, column].contiguous().view(FLOAT8).to(dtype)
        assert torch.equal(output.cpu(), expected.expand(rows, 16))


def test_the_weight_may_be_of_float8():
    weight = torch.randn(5, 64).to(FLOAT8)
    input, scale = torch.randn(3, 64), torch.rand(5, 2)
    output = foo_ops.linear_fp8(input, weight, scale)
    assert torch.equal(output, foo_ops.linear_fp8(input, weight.view(torch.uint8), scale))
    expected = reference.linear_fp8(input.double(), weight.view(torch.uint8), scale.double())
    assert_near(output, expected)


def test_a_nan_stays_in_its_column():
    weight = torch.zeros(4, 40, dtype=torch.uint8)
    weight[2, 37] = 0xFF
    for rows in (1, 9):
        output = foo_ops.linear_fp8(torch.ones(rows, 40), weight, torch.ones(4))
        assert output.isnan().all(0).tolist() == [False, False, True, False]


def arguments(**changed):
    given = {
        "input": torch.ones(2, 64),
        "weight": torch.zeros(3, 64, dtype=torch.uint8),
        "scale": torch.ones(3, 2),
        "bias": torch.ones(3),
    }
    return given | changed


ERRORS = [
    ("input", torch.ones(()), ValueError, "input must have at least 1 dimension, got 0"),
    ("weight", torch.zeros(3, 64), TypeError, "weight must be uint8, got float32"),
    ("weight", torch.zeros(3, 32, dtype=torch.uint8), ValueError,
     "weight must have 64 columns as input has, got 32"),
    ("scale", torch.ones(3, 2).bfloat16(), TypeError,
     "scale must be float32 for input of float32, got bfloat16"),
    ("scale", torch.ones(3, 2).double(), TypeError,
     "scale must be float32 for input of float32, got float64"),
    ("scale", torch.ones(3, 4), ValueError,
     "scale must have a column for each 32, 64 or 128 of the 64 columns of weight, got 4"),
    ("scale", torch.ones(4), ValueError,
     "scale must have 3 elements, one for each row of weight, got 4"),
    ("scale", torch.ones(3, 2, 1), ValueError,
     "scale must have 1 dimension (N) or 2 (N, K / group_size), got 3"),
    ("scale", torch.ones(3, 2, device="foo"), ValueError,
     "scale must be on cpu as input is, got foo:0"),
    ("bias", torch.ones(4), ValueError,
     "bias must have 3 elements, one for each row of weight, got 4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "kind", "message"), ERRORS)
def test_errors(name, value, kind, message):
    assert_refused(foo_ops.linear_fp8, kind, f"linear_fp8: {message}", arguments(**{name: value}))


def test_scales_of_an_input_in_float64():
    given = arguments(input=torch.ones(2, 64).double(), bias=torch.ones(3).double())
    with pytest.raises(TypeError, match="scale must be float64 for input of float64, got float32"):
        foo_ops.linear_fp8(**given)
