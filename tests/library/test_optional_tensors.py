"""Optional tensors with gradients: missing tensors have none."""

import itertools
import re

import pytest
import torch

from foo_ops import language, library


def second(grad_grad, grad_grad_bias, grad, x, bias, scale):
    """Return the second derivatives; the gradients are 2 x scale grad for x, grad for bias."""
    to_grad = 2 * x * scale * grad_grad
    if bias is None:
        return to_grad, 2 * scale * grad * grad_grad, None
    return to_grad + grad_grad_bias, 2 * scale * grad * grad_grad, 0.0 * bias


@library.elementwise_kernel(backward=second)
def first(grad, x, bias, scale):
    return 2 * x * scale * grad, grad


@library.numba_op("foo_optional::square", backward=first)
def square(x: float, bias: float | None, scale: float = 1.0) -> float:
    return scale * x * x if bias is None else scale * x * x + bias


library.define("foo_optional::affine", "(Tensor x, Tensor? weight, Tensor? bias) -> Tensor")
library.define(
    "foo_optional::affine_backward",
    "(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, bool weight_requires_grad, "
    "bool bias_requires_grad) -> (Tensor grad_x, Tensor? grad_weight, Tensor? grad_bias)",
)
library.register_fake("foo_optional::affine", lambda x, weight, bias: x.new_empty(x.shape))
calls = []


@library.register_fake("foo_optional::affine_backward")
def affine_backward_fake(grad, x, weight, bias, weight_requires_grad, bias_requires_grad):
    calls.append((weight_requires_grad, bias_requires_grad))
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape) if weight_requires_grad else None,
        bias.new_empty(bias.shape) if bias_requires_grad else None,
    )


@library.register_kernel("foo_optional::affine", ("cpu", "foo"))
@library.tile_kernel
def affine(x, weight, bias, output, rows):
    for row in rows:
        for i in range(x.shape[1]):
            value = x[row, i]
            if weight is not None:
                value = value * weight[i]
            if bias is not None:
                value = value + bias[i]
            output[row, i] = value


@library.register_kernel("foo_optional::affine_backward", ("cpu", "foo"))
@library.tile_kernel(tiles=lambda x: x.shape[1])
def affine_backward(
    grad, x, weight, bias, needs_weight, needs_bias, to_x, to_weight, to_bias, tiles
):
    for i in tiles:
        of_weight, of_bias = language.zero(x), language.zero(x)
        for row in range(x.shape[0]):
            to_x[row, i] = grad[row, i] if weight is None else grad[row, i] * weight[i]
            of_weight += grad[row, i] * x[row, i]
            of_bias += grad[row, i]
        if to_weight is not None:
            to_weight[i] = of_weight
        if to_bias is not None:
            to_bias[i] = of_bias


library.register_autograd("foo_optional::affine", "foo_optional::affine_backward")


def random(*shape, device):
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


@pytest.mark.parametrize("has_bias", [False, True])
def test_elementwise_kernel(has_bias, device):
    x = random(3, 4, device=device)
    bias = random(4, device=device) if has_bias else None
    expected = 0.5 * x * x + (bias if has_bias else 0)
    torch.testing.assert_close(square(x, bias, scale=0.5), expected)
    inputs = (x, bias) if has_bias else (x,)

    def function(x, bias=None):
        return square(x, bias, scale=0.5)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    gradients = torch.func.grad(lambda *inputs: function(*inputs).sum(), tuple(range(len(inputs))))
    for found, wanted in zip(
        gradients(*inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(found, wanted)
    tangents = tuple(torch.randn_like(it) for it in inputs)
    _, tangent = torch.func.jvp(function, inputs, tangents)
    torch.testing.assert_close(tangent, x * tangents[0] + (tangents[1] if has_bias else 0))


@pytest.mark.parametrize("has_bias", [False, True])
def test_only_what_is_there_is_computed(has_bias, device):
    x, bias = (random(4, device=device).detach() for _ in range(2))
    for place in (device, "meta"):
        given = [it.to(place) for it in (x, x, bias)]
        found = torch.ops.foo_optional.square_backward(
            *given[:2], given[2] if has_bias else None, 1.0
        )
        assert [it is not None for it in found] == [True, has_bias]
    assert str(torch.ops.foo_optional.square_backward.default._schema) == (
        "foo_optional::square_backward(Tensor grad0, Tensor x, Tensor? bias, float scale)"
        " -> (Tensor, Tensor?)"
    )
    assert str(torch.ops.foo_optional.square_backward_backward.default._schema) == (
        "foo_optional::square_backward_backward(Tensor grad_grad0, Tensor? grad_grad1, "
        "Tensor grad0, Tensor x, Tensor? bias, float scale) -> (Tensor, Tensor, Tensor?)"
    )


def test_gradient_of_one_that_requires_none(device):
    x, bias = random(3, 4, device=device), random(4, device=device)
    square(x.detach(), bias).sum().backward()
    assert x.grad is None
    assert bias.grad.tolist() == [3] * 4
    square(x, bias.detach()).sum().backward()
    assert bias.grad.tolist() == [3] * 4
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("has_bias", [False, True])
def test_mapped(has_bias, device):
    x = random(5, 4, device=device).detach()
    bias = random(4, device=device).detach() if has_bias else None
    mapped = torch.vmap(torch.func.grad(lambda x: square(x, bias).sum()))(x)
    torch.testing.assert_close(mapped, 2 * x)

    def gradients(x):
        return [
            it for it in torch.ops.foo_optional.square_backward(x, x, bias, 1.0) if it is not None
        ]

    for found, wanted in zip(torch.vmap(gradients)(x), [2 * x * x, x][: 1 + has_bias], strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("weight", "bias"), list(itertools.product([None, False, True], repeat=2)), ids=str
)
def test_tile_kernel(weight, bias, device):
    """None stands for a missing tensor, else whether it requires a gradient."""
    x = random(3, 4, device=device)
    weight, bias = (
        None if needs is None else random(4, device=device).detach().requires_grad_(needs)
        for needs in (weight, bias)
    )
    result = torch.ops.foo_optional.affine(x, weight, bias)
    expected = (x if weight is None else x * weight) + (0 if bias is None else bias)
    torch.testing.assert_close(result, expected)
    inputs = [it for it in (x, weight, bias) if it is not None and it.requires_grad]
    calls.clear()
    found = torch.autograd.grad(result.cos().sum(), inputs)
    wanted = torch.autograd.grad(expected.cos().sum(), inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    needed = tuple(it is not None and it.requires_grad for it in (weight, bias))
    assert calls in ([], [needed])


@pytest.mark.parametrize("has_bias", [False, True])
def test_opcheck(has_bias, device):
    x = random(3, 4, device=device)
    bias = random(4, device=device) if has_bias else None
    grad = x.detach().clone()
    detached = bias.detach() if has_bias else None
    for call, args in (
        (square.default, (x, bias)),
        (torch.ops.foo_optional.square_backward.default, (grad, x.detach(), detached, 1.0)),
        (torch.ops.foo_optional.affine.default, (x, None, bias)),
        (
            torch.ops.foo_optional.affine_backward.default,
            (grad, x.detach(), None, detached, False, has_bias),
        ),
    ):
        assert set(library.opcheck(call, args).values()) == {"SUCCESS"}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("has_bias", [False, True])
def test_compiled(has_bias, device):
    def function(x, bias):
        return torch.ops.foo_optional.affine(square(x, bias), None, bias)

    backend = "inductor" if device == "cpu" else "aot_eager"
    graph = torch.compile(function, backend=backend, fullgraph=True)
    x = random(3, 4, device=device)
    bias = random(4, device=device) if has_bias else None
    inputs = (x, bias) if has_bias else (x,)
    found = torch.autograd.grad(graph(x, bias).sum(), inputs)
    for one, other in zip(found, torch.autograd.grad(function(x, bias).sum(), inputs)):
        torch.testing.assert_close(one, other)


def test_fake_kernel_that_gives_no_tensor():
    library.define("foo_optional::none", "(Tensor x) -> (Tensor, Tensor?)")
    library.register_fake("foo_optional::none", lambda x: (None, None))
    kernel = library.tile_kernel(lambda x, first, second, rows: None)
    library.register_kernel("foo_optional::none", ("cpu", "foo"), kernel)
    message = "foo_optional::none: its fake kernel must return a tensor, got None"
    with pytest.raises(TypeError, match=re.escape(message)):
        torch.ops.foo_optional.none(torch.ones(2))
