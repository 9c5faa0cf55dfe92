"""foo::abs is differentiated, in place too, and counts versions."""

import pytest
import torch

import foo_ops

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_gradient_at_zero_is_zero(dtype, device):
    x = torch.zeros(3, dtype=dtype, device=device, requires_grad=True)
    foo_ops.abs(x).sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_second_derivative(dtype, device):
    x = torch.randn(5, dtype=dtype).to(device).requires_grad_()
    assert torch.autograd.gradgradcheck(foo_ops.abs, x)


def test_versions_are_counted(device):
    x, out = torch.ones(3, device=device), torch.ones(3, device=device)
    torch.ops.foo.abs_(x)
    assert x._version == 1
    foo_ops.abs(x, out=out)
    assert (x._version, out._version) == (1, 1)
    foo_ops.abs(x)
    assert x._version == 1


def test_change_of_a_saved_tensor_is_noticed(device):
    x = torch.randn(3, device=device, requires_grad=True)
    for change in (torch.ops.foo.abs_, lambda t: foo_ops.abs(torch.ones_like(t), out=t)):
        doubled = x * 2
        square = doubled**2
        with torch.no_grad():
            change(doubled)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.sum().backward()


def test_in_place_is_differentiated(device):
    values = torch.tensor([-2.0, 0.0, 3.0])
    x = values.to(device).requires_grad_()
    y = x * 2
    torch.ops.foo.abs_(y)
    (y**2).sum().backward()
    assert x.grad.tolist() == [-16.0, 0.0, 24.0]


def test_in_place_on_a_view_is_differentiated(device):
    x = torch.tensor([[-1.0, -2.0], [3.0, -4.0]]).to(device).requires_grad_()
    y = x * 1
    torch.ops.foo.abs_(y[:, 1])
    assert y.tolist() == [[-1.0, 2.0], [3.0, 4.0]]
    y.sum().backward()
    assert x.grad.tolist() == [[1.0, -1.0], [1.0, -1.0]]


def test_view_of_what_is_changed_in_place_sees_the_change(device):
    x = torch.tensor([-1.0, -2.0]).to(device).requires_grad_()
    y = x * 3
    view = y[1:]
    torch.ops.foo.abs_(y)
    view.sum().backward()
    assert x.grad.tolist() == [0.0, -3.0]


def test_in_place_refuses_a_leaf(device):
    x = torch.tensor([-1.0], device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        torch.ops.foo.abs_(x)
    assert x.item() == -1
    with torch.no_grad():
        torch.ops.foo.abs_(x)
    assert x.item() == 1


def test_out_refuses_autograd(device):
    x, out = torch.ones(3, device=device), torch.ones(3, device=device)
    for needs_gradient in (x, out):
        needs_gradient.requires_grad_()
        with pytest.raises(RuntimeError, match=r"out=... arguments don't support automatic"):
            foo_ops.abs(x, out=out)
        with torch.no_grad():
            foo_ops.abs(x, out=out)
        needs_gradient.requires_grad_(False)


def test_writes_to_inference_tensors(device):
    """They have no version to count, and may be written with ordinary tensors beside them."""
    with torch.inference_mode():
        out = torch.zeros(3, device=device)
        caches = torch.zeros(2, 1, 2, 8, 4, device=device).unbind()
    torch.ops.foo.abs.out(-torch.ones(3, device=device), out=out)
    assert out.tolist() == [1.0, 1.0, 1.0]
    rows, position = torch.ones(1, 2, 3, 4, device=device), torch.zeros(1, dtype=torch.int64)
    foo_ops.cache_append(*caches, rows, rows, position.to(device))
    assert all(cache.sum() == 24 for cache in caches)


def test_inference_tensors(device):
    with torch.inference_mode():
        x = torch.tensor([-1.0], device=device)
        torch.ops.foo.abs_(x)
        foo_ops.abs(torch.tensor([-3.0], device=device), out=x)
    assert x.item() == 3


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_in_place_is_differentiated(device):
    def function(x):
        y = x * 2
        torch.ops.foo.abs_(y)
        return y

    graph = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.tensor([-2.0, 3.0]).to(device).requires_grad_()
    graph(x).sum().backward()
    assert x.grad.tolist() == [-2.0, 2.0]
