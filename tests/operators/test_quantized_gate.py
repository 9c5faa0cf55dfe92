"""Gates of weights of 8 and 4 bits: sizes around those of blocks, extremes, errors.

Properties of every operator are tested in test_matrix.py.
"""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import foo_ops
from foo_ops.testing import (
    LINEAR_SILU_MUL_QUANTIZED,
    LINEAR_SILU_MUL_QUANTIZED_ACTIVATIONS,
    check_outputs,
    reference,
)
from foo_ops.testing.specs.linear import (
    gate_of,
    int4_sample,
    int8_groups_sample,
    int8_sample,
    rounded,
    rounded_by_section,
)

DTYPES = LINEAR_SILU_MUL_QUANTIZED_ACTIVATIONS.dtypes
GROUP_SIZES = (32, 64, 128)
MAKERS = {"int8": int8_groups_sample, "int4": int4_sample}


def check(sample, dtype):
    spec = LINEAR_SILU_MUL_QUANTIZED_ACTIVATIONS
    check_outputs(spec, sample, dtype, spec.call(sample))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 64, 65, 97, 130])
def test_sizes_of_int8(rows, dtype):
    """With more than 64 rows, the gate is the end of the product's kernel."""
    for outputs, depth in ((1, 1), (3, 64), (16, 31), (33, 513), (70, 1024), (129, 130), (257, 65)):
        make = int8_sample("gate", (rows,), depth, 2 * outputs, has_bias=False)
        check(gate_of(rounded(make))(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", MAKERS)
def test_sizes_of_groups(bits, group_size, dtype):
    for rows in (1, 16, 17, 45):
        for outputs, groups in ((1, 1), (7, 3), (33, 5), (140, 17)):
            make = MAKERS[bits](
                "gate", (rows,), groups, 2 * outputs, group_size=group_size, has_bias=False
            )
            for how in (rounded, rounded_by_section):
                check(gate_of(how(make))(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_the_results(dtype):
    of_groups = int4_sample("threads", (300,), 15, 998, group_size=64, has_bias=False)
    makers = [
        rounded(int8_sample("threads", (300,), 1100, 1998, has_bias=False)),
        rounded(of_groups),
        rounded_by_section(of_groups),
    ]
    threads = torch.get_num_threads()
    for make in makers:
        sample, found = gate_of(make)(dtype), []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found += LINEAR_SILU_MUL_QUANTIZED.call(sample)
        torch.set_num_threads(threads)
        assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("activations", [None, 8])
@pytest.mark.parametrize("bits", [8, 4])
def test_infinities_and_nan_stay_in_their_rows_and_columns(bits, activations):
    torch.manual_seed(0)
    input, weight = torch.randn(80, 128), torch.randn(20, 128) / 11
    given = foo_ops.quantize_weight(weight, bits, None if bits == 8 else 64)
    scale = given[1]
    expected = foo_ops.linear_silu_mul_quantized(input, *given, activations=activations)
    input[3, 5], scale[2], scale[14] = torch.inf, torch.nan, torch.nan
    found = foo_ops.linear_silu_mul_quantized(input, *given, activations=activations)
    wrong = found.isnan() | found.isinf()
    assert wrong[:, [2, 4]].all()
    # A row with an infinity is NaN if it is rounded, and infinite or NaN if it is not.
    row = [column for column in range(10) if column not in (2, 4)]
    if activations is not None:
        assert wrong[3].all()
    others = [it for it in range(80) if it != 3]
    assert torch.equal(found[others][:, row], expected[others][:, row])


def test_large_gates():
    """silu is 0 far below zero, and its argument far above."""
    input = torch.full((70, 64), 1e4)
    weight = torch.tensor([[127], [-127], [127], [127]], dtype=torch.int8).expand(4, 64)
    found = foo_ops.linear_silu_mul_quantized(
        input, weight.contiguous(), torch.full((4,), 1e4), activations=8
    )
    product = 1e4 * 1e4 * 127 * 64.0
    expected = torch.tensor([product * product, 0.0], dtype=torch.float64).expand(70, 2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_a_result_of_many_rows_is_rounded_once():
    """In bfloat16, 257 is rounded to 256, and silu(257) * 257 is 66049, or 66048 when rounded."""
    ones = torch.ones(80, 320, dtype=torch.bfloat16)
    weight = torch.zeros(2, 320, dtype=torch.int8)
    weight[:, :257] = 1
    scale = torch.ones(2, dtype=torch.bfloat16)
    found = foo_ops.linear_silu_mul_quantized(ones, weight, scale, activations=8)
    exact = torch.tensor(257.0 * 257.0)
    assert torch.equal(found, exact.bfloat16().expand(80, 1))
    assert exact.bfloat16() != torch.tensor(256.0 * 256.0).bfloat16()


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_autocast(device):
    input, weight = torch.randn(70, 64, device=device), torch.randn(6, 64, device=device)
    of_int8, of_int4 = (
        foo_ops.quantize_weight(weight, 8), foo_ops.quantize_weight(weight, 4, group_size=32)
    )  # fmt: skip
    for given in (of_int8, of_int4):
        with torch.autocast(device, torch.bfloat16):
            found = foo_ops.linear_silu_mul_quantized(input, *given, activations=8)
            with_gradients = foo_ops.linear_silu_mul_quantized(
                input.clone().requires_grad_(), *given, activations=8
            )
        assert (found.dtype, with_gradients.dtype) == (torch.bfloat16, torch.bfloat16)
        integers, *scales = given
        cast = [integers, *(it.bfloat16() for it in scales)]
        expected = foo_ops.linear_silu_mul_quantized(input.bfloat16(), *cast, activations=8)
        assert torch.equal(found, expected)
        torch.testing.assert_close(with_gradients, expected, rtol=0.05, atol=0.05)


def test_a_mapped_dimension_is_one_of_rows():
    sample = gate_of(rounded(int4_sample("vmap", (60, 3), 2, 10, has_bias=False)))(torch.float32)
    operator = LINEAR_SILU_MUL_QUANTIZED.operator
    (expected,) = LINEAR_SILU_MUL_QUANTIZED.call(sample)
    input, *others = sample.inputs
    mapped = torch.vmap(lambda it: operator(it, *others, **sample.keywords), 1, 1)(input)
    assert torch.equal(mapped, expected)


def test_flops():
    with FlopCounterMode(display=False) as counter:
        for make in (int8_sample("flops", (2, 3), 64, 10, has_bias=False),
                     int4_sample("flops", (2, 3), 2, 10, has_bias=False)):  # fmt: skip
            LINEAR_SILU_MUL_QUANTIZED.call(gate_of(make)(torch.float32))
    assert counter.get_total_flops() == 2 * (2 * 6 * 64 * 10)


def test_the_reference_is_silu_of_one_half_times_the_other():
    input = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    weight = torch.tensor([[1, 0], [0, 1]], dtype=torch.int8)
    found = reference.linear_silu_mul_quantized(input, weight, input.new_ones(2))
    assert found.item() == pytest.approx(2 / (1 + 2.718281828459045**-1))


# ----------------------------------------------------------------------------------------- errors


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


INT8 = {"input": zeros(2, 3), "weight": zeros(4, 3, dtype=torch.int8), "scale": zeros(4)}
INT4 = {
    "input": zeros(2, 64),
    "weight": zeros(4, 32, dtype=torch.uint8),
    "scale": zeros(4, 2),
    "zero": zeros(4, 2),
}
REFUSED = (
    (
        INT8 | {"weight": zeros(5, 3, dtype=torch.int8), "scale": zeros(5)},
        ValueError,
        "weight must have an even number of rows, those of the gate and as many of up, got 5",
    ),
    (
        INT8 | {"weight": zeros(4, 3, dtype=torch.uint8)},
        TypeError,
        "weight must be int8, got uint8",
    ),
    (INT8 | {"weight": zeros(4, dtype=torch.int8)}, ValueError,
     "weight must have 2 dimensions (N, K), got 1"),
    (INT8 | {"scale": zeros(3)}, ValueError,
     "scale must have 4 elements, one for each row of weight, got 3"),
    (INT8 | {"activations": 4}, ValueError, "activations must be None or 8, got 4"),
    (
        INT8 | {"input": zeros(2, 3, dtype=torch.float64),
                "scale": zeros(4, dtype=torch.float64), "activations": 8},
        TypeError,
        "input must be float16, bfloat16 or float32 for activations of 8 bits, got float64",
    ),
    (INT8 | {"activations": 8, "by_section": True}, ValueError,
     "by_section must be False for weights without groups, got True"),
    (INT4 | {"by_section": True}, ValueError,
     "by_section must be False without activations, got True"),
    (INT4 | {"weight": zeros(4, 32, dtype=torch.int8)}, TypeError,
     "weight must be uint8, got int8"),
    (INT4 | {"input": zeros(2, 63)}, ValueError,
     "input must have whole groups of 32 columns, got 63"),
    (INT4 | {"weight": zeros(4, 31, dtype=torch.uint8)}, ValueError,
     "weight must have 32 columns, one for each two columns of input, got 31"),
    (INT4 | {"scale": zeros(4)}, ValueError,
     "scale must have 2 dimensions (N, K / group_size), got 1"),
    (INT4 | {"scale": zeros(3, 2)}, ValueError, "scale must have 4 rows as weight has, got 3"),
    (INT4 | {"scale": zeros(4, 3)}, ValueError,
     "scale must have a column for each 32, 64 or 128 of the 64 columns of input, got 3"),
    (INT4 | {"zero": zeros(4, 1)}, ValueError, "zero must have 2 columns as scale has, got 1"),
    (INT4 | {"zero": zeros(4, 2).double()}, TypeError,
     "zero must be float32 as input is, got float64"),
    (INT4 | {"weight": zeros(3, 32, dtype=torch.uint8), "scale": zeros(3, 2),
             "zero": zeros(3, 2)}, ValueError,
     "weight must have an even number of rows, those of the gate and as many of up, got 3"),
)  # fmt: skip


@pytest.mark.parametrize("is_recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(("given", "error", "message"), REFUSED, ids=[it[2] for it in REFUSED])
def test_refused(given, error, message, is_fake, is_recorded):
    given = given | {"input": given["input"].clone().requires_grad_(is_recorded)}
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.enable_grad()
    message = f"linear_silu_mul_quantized: {message}"
    with mode, pytest.raises(error, match=f"^{re.escape(message)}$"):
        foo_ops.linear_silu_mul_quantized(**given)
