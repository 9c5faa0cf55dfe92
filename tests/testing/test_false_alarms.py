"""check_operator passes correct operators on which a careless check would fail."""

import dataclasses
import re

import pytest
import torch
from support.product_operator import define, failures_of, product, product_spec, spec_of

from foo_ops import library
from foo_ops.testing import CHECKS, Sample, check_operator, random
from foo_ops.testing.checks.calls import same

COMPILED = [name for name in CHECKS if name.startswith("compiled")]
FOO_ALONE = {"devices": ("foo",), "dtypes": (torch.float32,)}


def remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def logit_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad / (x * (1 - x))


def logit_spec(backward=logit_backward, **changes):
    """Make logit's spec; torch's gradient formula is NaN outside of (0, 1), this one is not."""
    operator = define(torch.logit, "(Tensor x) -> Tensor", fake=torch.empty_like)
    torch.library.register_autograd(operator, backward, setup_context=remember)

    def sized(dtype, size):
        return Sample((torch.linspace(0.1, 0.9, size + 2, dtype=torch.float64)[1:-1].to(dtype),))

    return spec_of(operator, reference=torch.logit, sized=sized, **changes)


def test_domain_of_a_function_is_not_left():
    check_operator(logit_spec(**FOO_ALONE))


def test_wrong_gradient_on_a_domain_is_found_when_compiled():
    def forgetful(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x

    for messages in failures_of(logit_spec(forgetful, **FOO_ALONE), COMPILED).values():
        assert "the gradient of x is wrong" in messages


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (0, 0, 1)])
def test_strides_of_no_elements_mean_nothing(shape):
    def kernel(a, b):
        out = product(a, b)
        return out if out.numel() > 0 else out.new_empty_strided(out.shape, (5,) * out.dim())

    def fake(a, b):
        return torch.empty(a.shape, dtype=a.dtype, device=a.device)

    def make(dtype):
        return Sample((torch.ones(shape).to(dtype), torch.ones(shape).to(dtype)))

    spec = product_spec(kernel, fake=fake, samples={"empty": make}, sizes=(), essential=("empty",))
    check_operator(spec, checks=[check for check in CHECKS if check not in COMPILED[1:]])


def test_wrong_strides_are_found():
    x = torch.arange(6.0).view(2, 3)
    same("equal", (x[:1],), (x[:1].as_strided((1, 3), (7, 1)),))
    message = "they differ: tensor 0 has strides (1, 2), not (3, 1)"
    with pytest.raises(AssertionError, match=re.escape(message)):
        same("they differ", (x.t().contiguous().t(),), (x,))


def scaled_by_sum(x, weight):
    return x * weight.sum()


def weighted_spec(fake=lambda x, weight: torch.empty_like(x), **changes):
    """Make the spec of an operator whose weight has as many elements as a size of the check."""
    operator = define(scaled_by_sum, "(Tensor x, Tensor weight) -> Tensor", fake=fake)

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight.sum(), (grad * x).sum().expand(weight.shape).contiguous()

    torch.library.register_autograd(operator, backward, setup_context=remember)

    def sized(dtype, size):
        return Sample(tuple(random("weighted", (size,), (3, 3), dtype=dtype)))

    return spec_of(operator, reference=scaled_by_sum, sized=sized, **changes)


def test_size_that_happens_to_be_that_of_something_else():
    spec = weighted_spec(dtypes=(torch.float32,))
    check_operator(spec, checks=["compiled_for_dynamic_shapes"])


def squared_error_gradient(grad, prediction, target, scale):
    slope = 2 * scale * (prediction - target) * grad
    return slope, -slope


def squared_error_spec(name, gradient=squared_error_gradient):
    """Make the spec of the tutorial's operator, with a broadcast operand."""

    @library.numba_op(f"alarms::{name}", backward=gradient)
    def squared_error(prediction: float, target: float, scale: float = 1.0) -> float:
        return scale * (prediction - target) ** 2

    def reference(prediction, target, scale=1.0):
        return scale * (prediction - target) ** 2

    def sized(dtype, size):
        return Sample(tuple(random("error", (size, 40), (40,), dtype=dtype)), {"scale": 0.7})

    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    return spec_of(
        squared_error, reference=reference, sized=sized, dtypes=dtypes, sizes=(0, 7, 301)
    )


def test_gradient_of_a_broadcast_operand_is_a_sum():
    check_operator(squared_error_spec("squared_error"), checks=["gradients", "layouts"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wrong_gradient_of_a_broadcast_operand_is_found(dtype):
    def wrong(grad, prediction, target, scale):
        slope = 2 * scale * (prediction - target) * grad
        return slope, -1.05 * slope

    spec = squared_error_spec(f"wrong_{dtype.itemsize}_{dtype.is_complex}", wrong)
    spec = dataclasses.replace(spec, dtypes=(dtype,))
    for message in failures_of(spec, ["gradients"]).values():
        assert "the gradient of target is wrong" in message
