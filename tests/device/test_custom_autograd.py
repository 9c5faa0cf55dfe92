"""A torch::autograd::Function in C++ runs, eagerly and under torch.compile."""

import pytest
import torch

OPERATORS = [
    torch.ops.foo.custom_autograd_fn_returns_self,
    torch.ops.foo.custom_autograd_fn_aliasing,
]


@pytest.fixture(params=OPERATORS, ids=["returns_self", "aliasing"])
def operator(request):
    return request.param


def check(function, device):
    input = torch.randn(3, 4, device=device, requires_grad=True)
    output = function(input)
    assert torch.equal(output, input)
    cotangent = torch.randn(3, 4, device=device)
    output.backward(cotangent)
    assert torch.equal(input.grad, cotangent * 0.5)


def test_gradient_is_halved(operator, device):
    check(operator, device)


def test_result_is_the_memory_of_the_input(operator, device):
    input = torch.randn(6, device=device)[::2]
    output = operator(input)
    assert output.data_ptr() == input.data_ptr()
    assert output.stride() == input.stride()


def test_without_gradient(operator, device):
    assert not operator(torch.ones(2, device=device)).requires_grad


def test_in_place_operator_on_the_result_is_refused(operator, device):
    """The write would bypass the gradient, so torch refuses it on results of a Function."""
    input = torch.ones(3, device=device, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="This view was created inside a custom Function"):
        operator(input).mul_(3)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(operator, dynamic, device):
    function = torch.compile(
        lambda tensor: operator(tensor), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    check(function, device)
