"""Operators are redefined, as by a notebook cell; custom_op and torch_dispatch on foo."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foo_ops import library

CELL = """
from foo_ops import library

library.define("cells::f", "(Tensor x{more}) -> Tensor")
library.define("cells::f.out", "(Tensor x{more}, *, Tensor(a!) out) -> Tensor(a!)")


@library.register_fake("cells::f")
def fake(x, *more):
    return x.new_empty(x.shape)


kernel = library.elementwise_kernel(lambda x{more_names}: x * {factor})
library.register_kernel("cells::f", ("cpu", "foo"), kernel)
library.register_kernel("cells::f.out", ("cpu", "foo"), kernel)
library.register_autograd("cells::f", lambda ctx, grad: (grad * {factor}{none}))
library.register_vmap("cells::f", lambda info, dims, x, *more: (x * {factor}, dims[0]))
library.impl("cells::f", "Meta", lambda x, *more: x.new_empty(x.shape))
"""


def run(cell, **names):
    exec(cell.format(**names), {"__name__": "notebook"})


def test_cell_may_run_again(device):
    x = torch.ones(3, device=device, requires_grad=True)
    for factor in (2, 3):
        run(CELL, factor=factor, more="", more_names="", none=",")
        f = torch.ops.cells.f
        assert f(x).tolist() == [factor] * 3
        assert torch.autograd.grad(f(x).sum(), x)[0].tolist() == [factor] * 3
        assert f(x.detach(), out=x.detach().clone()).tolist() == [factor] * 3
        assert torch.vmap(f)(x.detach()).tolist() == [factor] * 3
        assert set(library.opcheck(f.default, (x,)).values()) == {"SUCCESS"}
    # With a different schema.
    run(CELL, factor=5, more=", float scale", more_names=", scale", none=", None")
    assert torch.ops.cells.f(x, 0.5).tolist() == [5] * 3
    assert "scale" in str(torch.ops.cells.f.default._schema)


def test_nothing_is_left_of_the_former_definition():
    text = 'from foo_ops import library\nlibrary.define("cells::g", "(Tensor x) -> Tensor")\n'
    run(
        text
        + 'library.register_kernel("cells::g", "cpu", library.elementwise_kernel(lambda x: -x, '
        "backward=lambda grad, x: grad))"
    )
    assert torch._C._dispatch_has_kernel("cells::g_backward")
    run(text)
    for key in ("CPU", "Autograd", "Meta"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("cells::g", key)
    assert not torch._C._dispatch_has_kernel("cells::g_backward")
    with pytest.raises(NotImplementedError, match="cells::g"):
        torch.ops.cells.g(torch.ones(2))


def test_operator_of_another_module_stays():
    run('from foo_ops import library\nlibrary.define("cells::h", "(Tensor x) -> Tensor")')
    for define in (library.define, torch.library.define):
        with pytest.raises(RuntimeError, match="multiple times"):
            define("cells::h", "(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="multiple times"):
        library.numba_op("cells::h", identity())
    lib = library.Library("cells", "FRAGMENT")
    with pytest.raises(RuntimeError, match="multiple times"):
        library.define("cells::h", "(Tensor x) -> Tensor", lib=lib)


def other_backward(a: float, b: float) -> float:
    return a + b


def three(x: float) -> float:
    return 3 * x


def of_three(g: float, x: float) -> float:
    return 3 * g


def of_gradient(h, g, x):
    return 3 * h, 0.0


def by_numba_op(name, backward):
    library.numba_op(name, three, backward=backward)


def by_register_kernel(name, backward):
    library.define(name, "(Tensor x) -> Tensor")
    kernel = library.elementwise_kernel(three, backward=backward)
    for device in ("cpu", "foo"):
        library.register_kernel(name, device, kernel)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("register", [by_numba_op, by_register_kernel])
def test_backward_leaves_an_operator_of_its_name_alone(register, times, device):
    """Also if it is the operator of second derivatives, and if a cell runs again."""
    name = f"foo_again::three_{register.__name__}_{times}_{device}"
    other = f"{name}{times * '_backward'}"
    backward = of_three
    if times == 2:
        backward = library.elementwise_kernel(of_three, backward=of_gradient)
    schema = f"{other}(Tensor a, Tensor b) -> Tensor"
    message = (
        f"{name}: backward defines the operator {other}, which must not exist yet, got {schema}"
    )
    packet = library.numba_op(other, other_backward)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z"):
            register(name, backward)
        assert packet(*torch.ones(2, 1, device=device)).tolist() == [2]


@pytest.mark.parametrize("register", [by_numba_op, by_register_kernel])
def test_backward_of_its_own_is_replaced(register, device):
    name = f"foo_again::own_{register.__name__}_{device}"
    for factor in (3.0, 4.0):
        register(name, lambda g, x: g * factor)  # noqa: B023
        x = torch.ones(2, device=device, requires_grad=True)
        getattr(torch.ops.foo_again, name.partition("::")[2])(x).sum().backward()
        assert x.grad.tolist() == [factor, factor]


def identity():
    def h(x: float) -> float:
        return x

    return h


def test_custom_op_on_foo(device):
    @library.custom_op("cells::custom", mutates_args=(), device_types="cpu")
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x.cpu() * 2

    @custom.register_kernel("foo")
    def custom_foo(x):
        return x * 2 + 0

    custom.register_fake(torch.empty_like)
    custom.register_autograd(lambda ctx, grad: grad * 2)
    x = torch.ones(3, device=device, requires_grad=True)
    custom(x).sum().backward()
    assert custom(x).tolist() == x.grad.tolist() == [2, 2, 2]
    assert custom(x).device == x.device
    compiled = torch.compile(custom, backend="aot_eager", fullgraph=True)
    assert compiled(x).tolist() == [2, 2, 2]
    assert set(library.opcheck(custom, (x,)).values()) == {"SUCCESS"}


def test_custom_op_for_foo_alone():
    @library.custom_op("cells::foo_alone", mutates_args=("x",), device_types="foo")
    def foo_alone(x: torch.Tensor) -> None:
        x.add_(1)

    x = torch.zeros(2, device="foo")
    foo_alone(x)
    assert x.tolist() == [1, 1]
    with pytest.raises(NotImplementedError, match="CPU"):
        foo_alone(torch.zeros(2))


def test_torch_dispatch_of_a_mode(device):
    library.define("cells::seen", "(Tensor x) -> Tensor")
    library.register_kernel(
        "cells::seen", ("cpu", "foo"), library.elementwise_kernel(lambda x: x + 1)
    )

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    @library.register_torch_dispatch("cells::seen", Mode)
    def seen(mode, func, types, args, kwargs):
        return func(*args) * 10

    x = torch.ones(2, device=device)
    with Mode():
        assert torch.ops.cells.seen(x).tolist() == [20, 20]
    assert torch.ops.cells.seen(x).tolist() == [2, 2]
