"""Jagged nested tensors: row operators compute all parts in one call, with gradients."""

import functools
import re

import pytest
import torch
from torch.testing import assert_close

import foo_ops

LENGTHS = (3, 0, 5, 1)
K, N = 32, 6
ops = torch.ops.foo


def weights(device="cpu"):
    return torch.randn(N, K, device=device), torch.randn(N, K, device=device)


def with_weights(operator, **keywords):
    return lambda input: operator(input, *weights(input.device), **keywords)


def with_quantized(operator, bits, group_size=None):
    def call(input):
        quantized = foo_ops.quantize_weight(torch.randn(N, K), bits, group_size)
        tensors = [it.to(input.device) for it in quantized if it is not None]
        keywords = {} if group_size is None else {"group_size": group_size}
        return operator(input, *tensors, **keywords)

    return call


def twice(operator):
    return lambda input, *rest: operator(input, input.neg(), *rest)


CALLS = {
    "abs": ops.abs.default,
    "silu_mul": twice(ops.silu_mul.default),
    "rms_norm": ops.rms_norm.default,
    "rms_norm with a weight": lambda x: foo_ops.rms_norm(x, torch.arange(K).to(x)),
    "add_rms_norm": twice(ops.add_rms_norm.default),
    "layer_norm": lambda x: foo_ops.layer_norm(x, torch.arange(K).to(x), torch.ones(K).to(x)),
    "add_layer_norm": twice(ops.add_layer_norm.default),
    "linear": lambda x: foo_ops.linear(x, weights(x.device)[0], torch.arange(N).to(x)),
    "linear_activation": lambda x: foo_ops.linear(x, weights(x.device)[0], activation="silu"),
    "linear_silu_mul": with_weights(ops.linear_silu_mul.default),
    "linear_int8": with_quantized(ops.linear_int8.default, 8),
    "linear_fp8": lambda x: foo_ops.linear_fp8(
        x, weights(x.device)[0].to(torch.float8_e4m3fn), torch.linspace(1, 2, N).to(x)
    ),
    "linear_int4": with_quantized(ops.linear_int4.default, 4, 32),
    "linear_int8 of rounded rows": with_quantized(
        functools.partial(ops.linear_int8.default, activations=8), 8
    ),
    "linear_silu_mul_quantized": with_quantized(ops.linear_silu_mul_quantized.default, 8),
    "linear_mxfp4": lambda x: foo_ops.linear_mxfp4(
        x, *(it.to(x.device) for it in foo_ops.quantize_mxfp4(weights()[0]))
    ),
    "linear_table4": lambda x: foo_ops.linear_table4(
        x,
        *(it.to(x.device) for it in foo_ops.quantize_mxfp4(weights()[0])[:1]),
        torch.ones(N, K // 32).to(x),
        torch.linspace(-1, 1, 16).to(x),
    ),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


def nested(values):
    """Make a nested tensor of ``values``, to which gradients flow back."""
    offsets = torch.tensor([0, *LENGTHS], device=values.device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def rows(*shape, device="cpu"):
    return torch.randn(sum(LENGTHS), *shape, K, device=device)


def results_of(call, input):
    torch.manual_seed(1)
    results = call(input)
    return results if isinstance(results, tuple) else (results,)


def assert_same_rows(call, input, values):
    for result, expected in zip(results_of(call, input), results_of(call, values), strict=True):
        assert result.layout == torch.jagged
        assert result.shape[: input._ragged_idx + 1] == input.shape[: input._ragged_idx + 1]
        assert_close(result.values(), expected, rtol=0, atol=0)


@calls
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_rows_are_computed_as_dense_ones(call, shape, device):
    values = rows(*shape, device=device)
    assert_same_rows(call, nested(values), values)


@calls
def test_gradients(call, device):
    values = rows(device=device)
    gradients = []
    for nest in (nested, lambda it: it):
        leaf = values.clone().requires_grad_()
        results = results_of(call, nest(leaf))
        flat = [it.values() if it.is_nested else it for it in results]
        gradients += torch.autograd.grad(sum(it.square().sum() for it in flat), leaf)
    assert_close(*gradients, rtol=0, atol=0)


def test_second_derivatives():
    values = rows().double()
    leaves = [torch.randn(*shape, dtype=torch.float64) for shape in ([K], [K, K], [N, K])]
    gradients = []
    for input in (nested(values), values):
        inputs = [it.clone().requires_grad_() for it in leaves]
        norm, *linear = inputs
        hidden = foo_ops.linear(foo_ops.rms_norm(input, norm), linear[0], activation="silu")
        output = foo_ops.linear(hidden, linear[1])
        output = output.values() if output.is_nested else output
        first = torch.autograd.grad(output.pow(3).sum(), inputs, create_graph=True)
        gradients.append(torch.autograd.grad(sum(it.pow(2).sum() for it in first), inputs))
    assert_close(*gradients)


def test_results_are_written_in_place():
    leaf = rows().requires_grad_()
    output = ops.abs.default(nested(leaf)).mul_(3)
    output.values().sum().backward()
    assert_close(leaf.grad, 3 * leaf.detach().sign())


def test_linear_of_each_part():
    torch.manual_seed(0)
    parts = [torch.randn(length, K) for length in LENGTHS]
    weight, bias = torch.randn(N, K), torch.randn(N)
    input = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    leaves = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    output = foo_ops.linear(input, *leaves)
    for part, result in zip(parts, output.unbind(), strict=True):
        expected = part.double() @ weight.double().T + bias.double()
        assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)
    output.values().sum().backward()
    joined = torch.cat(parts).double()
    assert_close(leaves[0].grad.double(), joined.sum(0).expand(N, K), rtol=1e-5, atol=1e-4)
    assert_close(leaves[1].grad, torch.full([N], float(len(joined))))
    expected = weight.double().sum(0).expand(joined.shape)
    assert_close(input.grad.values().double(), expected, rtol=1e-5, atol=1e-5)


@calls
def test_in_inference_mode(call):
    values = rows()
    before = nested(values)
    with torch.inference_mode():
        assert_same_rows(call, before, values)
        values = rows()
        assert_same_rows(call, nested(values), values)


def test_compiled_graphs():
    def function(values, gate, up):
        input = nested(values)
        output = ops.linear_silu_mul.default(foo_ops.rms_norm(input), gate, up)
        return output + ops.abs.default(foo_ops.linear(input, gate, activation="relu"))

    compiled = torch.compile(lambda *inputs: function(*inputs).values(), fullgraph=True)
    inputs = [it.requires_grad_() for it in (rows(), *weights())]
    results = [compiled(*inputs), function(*inputs).values()]
    assert_close(*results)
    gradients = [torch.autograd.grad(it.square().sum(), inputs) for it in results]
    assert_close(*gradients)


def test_compiled_graphs_take_nested_inputs():
    compiled = torch.compile(lambda *it: ops.linear.default(*it).sin(), fullgraph=True)
    input, weight = nested(rows()), weights()[0]
    assert_close(compiled(input, weight).values(), ops.linear(input, weight).sin().values())


def with_holes(values):
    """Nest two parts of nine rows; the first, fourth and last row belong to neither part."""
    offsets, lengths = torch.tensor([1, 4, 9]), torch.tensor([2, 4])
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)


HOLES = [0, 3, 8]


def parts_of(values):
    return torch.cat([values[1:3], values[4:8]])


@calls
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_memory_between_parts_is_no_row(call, shape):
    values = rows(*shape)
    values[HOLES] = torch.nan
    for result, expected in zip(
        results_of(call, with_holes(values)), results_of(call, parts_of(values)), strict=True
    ):
        assert_close(torch.cat(result.unbind()), expected, rtol=1e-4, atol=1e-4)
        assert (result + result).shape == result.shape


@calls
def test_gradients_do_not_see_memory_between_parts(call):
    values = rows()
    values[HOLES] = torch.nan
    leaf, dense = values.clone().requires_grad_(), parts_of(values).requires_grad_()
    flat = [torch.cat(it.unbind()) for it in results_of(call, with_holes(leaf))]
    sum(it.square().sum() for it in flat).backward()
    sum(it.square().sum() for it in results_of(call, dense)).backward()
    assert_close(parts_of(leaf.grad), dense.grad, rtol=1e-4, atol=1e-3)
    assert_close(leaf.grad[HOLES], torch.zeros(3, K))


def test_gradients_of_weights_do_not_see_memory_between_parts():
    values = rows()
    values[HOLES] = torch.nan
    gradients = []
    for input in (with_holes(values), parts_of(values)):
        weight = torch.ones(N, K, requires_grad=True)
        output = foo_ops.linear(foo_ops.rms_norm(input), weight)
        output = torch.cat(output.unbind()) if output.is_nested else output
        gradients.append(torch.autograd.grad(output.square().sum(), weight))
    assert_close(*gradients)


def test_narrowed_tensors():
    base = torch.randn(3, 6, K, requires_grad=True)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 0, 4])
    input = torch.nested.narrow(base, 1, starts, lengths, layout=torch.jagged)
    weight = torch.randn(K, K)
    total = input + foo_ops.add_rms_norm(input, foo_ops.linear(input, weight))[1]
    parts = [row[i : i + n] for row, i, n in zip(base, starts.tolist(), lengths.tolist())]
    for part, result in zip(parts, total.unbind(), strict=True):
        assert_close(result, 2 * part + part @ weight.T, rtol=1e-4, atol=1e-4)
    heads = torch.nested.narrow(base.unflatten(-1, (2, 16)), 1, starts, lengths, torch.jagged)
    for part, result in zip(parts, ops.abs.default(heads.transpose(1, 2)).unbind(), strict=True):
        assert_close(result, part.unflatten(-1, (2, 16)).transpose(0, 1).abs())


def test_compiled_graphs_with_memory_between_parts():
    values, weight = rows(), weights()[0]
    values[HOLES] = torch.nan
    compiled = torch.compile(lambda *it: ops.linear.default(*it).sin(), fullgraph=True)
    result = torch.cat(compiled(with_holes(values), weight).unbind())
    assert_close(result, foo_ops.linear(parts_of(values), weight).sin())


@calls
def test_heads_before_positions(call):
    values = rows(2)
    input = nested(values).transpose(1, 2)
    assert input._ragged_idx == 2
    assert_same_rows(call, input, values.transpose(0, 1))


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert foo_ops.linear(nested(rows()), weights()[0]).dtype == torch.bfloat16


def test_results_add_up_with_their_inputs():
    input = nested(rows())
    weight = torch.randn(K, K)
    assert (input + foo_ops.linear(foo_ops.rms_norm(input), weight)).shape == input.shape


def test_elements_side_by_side():
    input = nested(torch.arange(-4.0, 5.0))
    assert_close(ops.abs.default(input).values(), torch.arange(-4.0, 5.0).abs())


def refused(error, message, function, *inputs):
    with pytest.raises(error, match=rf"\A{re.escape(message)}\Z"):
        function(*inputs)


def test_what_does_not_fit_is_refused():
    values = rows()
    input, weight = nested(values), weights()[0]
    shape = list(input.shape)
    refused(
        ValueError,
        f"silu_mul: up must be ragged like gate, got shapes {list(values.shape)} and {shape}",
        ops.silu_mul.default,
        input,
        values,
    )
    lengths = torch.tensor([1, 1])
    one, other = (
        torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), lengths)
        for offsets in ([0, 3, 9], [0, 4, 9])
    )
    assert one.shape == other.shape
    refused(
        ValueError,
        f"silu_mul: up must be ragged like gate, got shapes {list(one.shape)} and "
        f"{list(one.shape)}",
        ops.silu_mul.default,
        one,
        other,
    )
    refused(
        ValueError,
        f"linear: weight must have {K} columns as input has, got {K + 1}",
        ops.linear.default,
        input,
        torch.ones(N, K + 1),
    )
    refused(
        NotImplementedError,
        "linear: weight must be a dense tensor, got a nested one",
        ops.linear.default,
        input,
        input,
    )
    side_by_side = input.transpose(1, 2)
    refused(
        NotImplementedError,
        "linear: input must not be ragged in the last dimension, got shape "
        f"{list(side_by_side.shape)}",
        ops.linear.default,
        side_by_side,
        weight,
    )


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_strided_layout_is_refused(mode):
    with mode():
        input = torch.nested.nested_tensor([torch.ones(2, K), torch.ones(1, K)])
        refused(
            NotImplementedError,
            "linear: input must be dense or nested with layout torch.jagged, got a nested tensor "
            "with layout torch.strided",
            ops.linear.default,
            input,
            weights()[0],
        )
