"""The CPU's scaled_dot_product_attention after activate_flash_attention_impl("foo")."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from support.parts import whole
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def activated():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        activate_flash_attention_impl("foo")
    yield
    restore_flash_attention_impl()


def inputs(dtype=torch.float32, queries=7, keys=11, transposed=True):
    shapes = [(2, 3, length, 16) for length in (queries, keys, keys)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    if transposed:
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    return [tensor.requires_grad_() for tensor in tensors]


def exact(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Return the formula's output in float64, and the gradients of the sum of its sine."""
    query, key, value = (it.detach().double().requires_grad_() for it in (query, key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    output = scores.softmax(-1) @ value
    return output.detach(), torch.autograd.grad(output.sin().sum(), (query, key, value))


def called(function):
    """Return the names of the operators that a function calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.key for event in profile.key_averages()}


def masks():
    seen = torch.rand(7, 11) < 0.7
    seen[:, 0] = True
    return {
        "none": None,
        "bool": seen,
        "bool of batch": seen.expand(2, 1, 7, 11),
        "float": torch.randn(7, 11),
        "float of heads": torch.randn(2, 3, 7, 11),
        "broadcast": torch.randn(2, 1, 1, 11),
    }


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("options", [{}, {"scale": 0.4}], ids=str)
def test_values_and_gradients(options, mask, dtype):
    tensors, mask = inputs(dtype), masks()[mask]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    check(tensors, dtype, attn_mask=mask, **options)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 8), (1, 6)])
@pytest.mark.parametrize("transposed", [False, True])
def test_causal(transposed, queries, keys, dtype):
    check(inputs(dtype, queries, keys, transposed), dtype, is_causal=True)


def check(tensors, dtype, **options):
    tolerance = TOLERANCES[dtype]
    output = F.scaled_dot_product_attention(*tensors, **options)
    gradients = torch.autograd.grad(output.sin().sum(), tensors)
    wanted, wanted_gradients = exact(*tensors, **options)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=tolerance)
    for found, expected in zip(gradients, wanted_gradients):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=4 * tolerance)


def test_results_lie_in_memory_as_those_of_torch():
    for transposed, is_causal in itertools.product((False, True), repeat=2):
        tensors = inputs(queries=11, transposed=transposed)
        found = strides(tensors, is_causal)
        restore_flash_attention_impl()
        assert found == strides(tensors, is_causal)
        activate_flash_attention_impl("foo")


def strides(tensors, is_causal):
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, logsumexp = operator(*tensors, is_causal=is_causal)
    gradients = torch.autograd.grad(output.sum(), tensors)
    results = (output, logsumexp, *gradients)
    return [(result.shape, result.stride(), result.dtype) for result in results]


@pytest.mark.parametrize("dynamic", [True, *whole(False)])
def test_compiled(dynamic):
    @torch.compile(fullgraph=True, dynamic=dynamic)
    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True) * 2

    for length in (9, 12):
        tensors = inputs(queries=length, keys=length)
        output = attend(*tensors)
        gradients = torch.autograd.grad((output / 2).sin().sum(), tensors)
        wanted, wanted_gradients = exact(*tensors, is_causal=True)
        torch.testing.assert_close(output.double(), 2 * wanted, rtol=2e-5, atol=2e-5)
        for found, expected in zip(gradients, wanted_gradients):
            torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=8e-5)


def test_whose_kernels_run():
    tensors = inputs()

    def call():
        F.scaled_dot_product_attention(*tensors).sum().backward()

    ours = {"foo::attention_seeded", "foo::attention_backward"}
    assert ours <= called(call)
    restore_flash_attention_impl()
    assert not ours & called(call)
    activate_flash_attention_impl("foo")
    assert ours <= called(call)


def test_what_torch_computes_by_its_formula_stays():
    tensors = inputs()
    mask = torch.zeros(7, 11, requires_grad=True)
    F.scaled_dot_product_attention(*tensors, attn_mask=mask).sin().sum().backward()
    assert mask.grad.abs().sum() > 0
    torch.manual_seed(0)
    found = F.scaled_dot_product_attention(*tensors, dropout_p=0.5)
    restore_flash_attention_impl()
    torch.manual_seed(0)
    assert found.equal(F.scaled_dot_product_attention(*tensors, dropout_p=0.5))
    activate_flash_attention_impl("foo")


def test_dropout_is_refused_where_the_kernel_is_called():
    message = "dropout_p must be 0 for flash attention on the CPU, got 0.5"
    with pytest.raises(NotImplementedError, match=message):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs(), dropout_p=0.5)


def test_results_of_nothing():
    query, key, value = inputs(queries=0)
    output = F.scaled_dot_product_attention(query, key, value)
    assert output.shape == query.shape
    output.sum().backward()
    assert not key.grad.any()
