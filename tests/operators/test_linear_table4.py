"""foo::linear_table4: its codes, its table, its errors.

test_matrix.py has what holds for every operator, and test_quantized_linear.py what holds for
several formats.
"""

import pytest
import torch
from support.refusals import assert_refused

import foo_ops

# The numbers of NF4 (Dettmers et al. 2023, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_each_code_is_multiplied_as_its_number(device, dtype, group_size, rows):
    """One element of a row is 1 and all others are 0, so that an output is a weight."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    codes = (torch.arange(16)[:, None] + torch.arange(group_size)) % 16
    weight = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    table, scale = torch.tensor(NF4, dtype=wide), torch.linspace(1, 3, 16, dtype=wide)[:, None]
    for column in range(0, group_size, 5):
        input = torch.zeros(rows, group_size, dtype=dtype)
        input[:, column] = 1
        output = foo_ops.linear_table4(*(it.to(device) for it in (input, weight, scale, table)))
        expected = (table[codes[:, column]] * scale[:, 0]).to(dtype)
        assert torch.equal(output.cpu(), expected.expand(rows, 16))


def test_a_number_of_the_table_may_be_infinite():
    weight = torch.zeros(3, 32, dtype=torch.uint8)
    weight[1, 5] = 0x70
    table = torch.tensor([*NF4[:7], torch.inf, *NF4[8:]])
    for rows in (1, 9):
        input = torch.ones(rows, 64)
        output = foo_ops.linear_table4(input, weight, torch.ones(3, 2), table)
        assert output.tolist() == [[-64, torch.inf, -64]] * rows


@pytest.mark.parametrize("first", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("rows", [1, 4, 9, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_only_codes_0_meet_the_first_number(device, dtype, rows, first):
    """Padding has the code 0, which must not reach a result where that number is not finite."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 16, (19, 96), generator=random)
    codes[3, 7] = codes[18, 95] = 0
    weight = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    table, scale = torch.tensor((first, *NF4[1:]), dtype=wide), torch.ones(19, 3, dtype=wide)
    input = (torch.rand(rows, 96, generator=random) + 0.5).to(dtype)
    output = foo_ops.linear_table4(*(it.to(device) for it in (input, weight, scale, table))).cpu()
    expected = input.double() @ table.double()[codes].t()
    finite = expected.isfinite()
    assert finite.sum() == rows * 17
    assert torch.equal(finite, output.isfinite())
    assert torch.equal(expected[~finite].to(dtype).isnan(), output[~finite].isnan())
    if not torch.tensor(first).isnan():
        assert torch.equal(expected[~finite].to(dtype), output[~finite])
    # Weights may be rounded to bfloat16.
    room = 2 * torch.finfo(dtype).eps * (input.double() @ table.double()[codes].abs().t())
    assert bool(((output.double() - expected).abs() <= room)[finite].all())


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_an_infinite_input_takes_the_sign_of_its_weight(rows):
    weight = torch.full((4, 32), 0xF0, dtype=torch.uint8)  # -1 and 1 in turn
    table, input = torch.tensor(NF4), torch.ones(rows, 64)
    for column in (0, 1, 20, 47):
        infinite = input.index_fill(1, torch.tensor([column]), torch.inf)
        output = foo_ops.linear_table4(infinite, weight, torch.ones(4, 2), table)
        assert torch.equal(output, torch.full((rows, 4), torch.inf if column % 2 else -torch.inf))


def arguments(**changed):
    given = {
        "input": torch.ones(2, 64),
        "weight": torch.zeros(3, 32, dtype=torch.uint8),
        "scale": torch.ones(3, 2),
        "table": torch.ones(16),
        "bias": torch.ones(3),
    }
    return given | changed


ERRORS = [
    ("input", torch.ones(()), ValueError, "input must have at least 1 dimension, got 0"),
    ("input", torch.ones(2, 48), ValueError,
     "input must have whole groups of 32 columns, got 48"),
    ("weight", torch.zeros(3, 32), TypeError, "weight must be uint8, got float32"),
    ("weight", torch.zeros(3, 64, dtype=torch.uint8), ValueError,
     "weight must have 32 columns, one for each two columns of input, got 64"),
    ("scale", torch.ones(3, 2).bfloat16(), TypeError,
     "scale must be float32 for input of float32, got bfloat16"),
    ("scale", torch.ones(3), ValueError,
     "scale must have 2 dimensions (N, K / group_size), got 1"),
    ("scale", torch.ones(4, 2), ValueError, "scale must have 3 rows as weight has, got 4"),
    ("scale", torch.ones(3, 4), ValueError,
     "scale must have a column for each 32, 64 or 128 of the 64 columns of input, got 4"),
    ("table", torch.ones(16).double(), TypeError,
     "table must be float32 for input of float32, got float64"),
    ("table", torch.ones(1, 16), ValueError, "table must have 1 dimension (16), got 2"),
    ("table", torch.ones(15), ValueError,
     "table must have 16 elements, one for each code, got 15"),
    ("table", torch.ones(16, device="foo"), ValueError,
     "table must be on cpu as input is, got foo:0"),
    ("bias", torch.ones(4), ValueError,
     "bias must have 3 elements, one for each row of weight, got 4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "kind", "message"), ERRORS)
def test_errors(name, value, kind, message):
    assert_refused(
        foo_ops.linear_table4, kind, f"linear_table4: {message}", arguments(**{name: value})
    )
