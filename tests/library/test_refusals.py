"""Operators without derivatives raise instead of losing gradients and tangents."""

import re

import pytest
import torch
from support.processes import run

from foo_ops import library

DEVICES = ("cpu", "foo")
MESSAGE = (
    "test_refusals::{}: it has no derivative; to get one, use foo_ops.library.{}, or call it "
    "under torch.no_grad() or with detached tensors"
)
FUNCTIONAL = MESSAGE.format("split", "register_autograd")
IN_PLACE = MESSAGE.format("double_", "register_variant_autograd")
ops = torch.ops.test_refusals


@pytest.fixture(autouse=True)
def operators():
    lib = torch.library.Library("test_refusals", "FRAGMENT")
    library.define("test_refusals::split", "(Tensor x) -> (Tensor, Tensor)", lib=lib)
    library.define("test_refusals::double_", "(Tensor(a!) x) -> Tensor(a!)", lib=lib)
    library.define("test_refusals::fill", "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", lib=lib)
    split = library.elementwise_kernel(
        lambda x: (2 * x, 3), dtypes=(torch.float32,), result_type=(None, torch.int64)
    )
    library.register_kernel("test_refusals::split", DEVICES, split, lib=lib)
    double = library.elementwise_kernel(lambda x: 2 * x)
    library.register_kernel("test_refusals::double_", DEVICES, double, lib=lib)
    library.register_kernel("test_refusals::fill", DEVICES, double, lib=lib)
    yield lib
    lib._destroy()


def refused(message):
    return pytest.raises(NotImplementedError, match=re.escape(message))


@pytest.fixture
def x(device):
    return torch.ones(2, device=device, requires_grad=True)


def test_gradients(x):
    double, three = ops.split(x)
    assert double.requires_grad
    assert not three.requires_grad
    with refused(FUNCTIONAL):
        double.sum().backward()
    # Terms independent of the operator keep their gradient.
    (x + double.detach()).sum().backward()
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.vjp(f, x)[1](x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.linearize(f, x)[1](x),
        lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    ],
    ids=["grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize", "vmap of grad"],
)
def test_transforms(transform, device):
    with refused(FUNCTIONAL):
        transform(lambda x: ops.split(x)[0], torch.ones(2, device=device))


def test_calls_that_need_none(x):
    with torch.no_grad():
        assert not ops.split(x)[0].requires_grad
    assert not ops.split(x.detach())[0].requires_grad
    assert torch.vmap(lambda x: ops.split(x)[0])(x.detach()).tolist() == [2, 2]


def test_in_place(x):
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        ops.double_(x)
    assert x.tolist() == [1, 1]
    copy = x.clone()
    ops.double_(copy[:1])
    assert copy.tolist() == [2, 1]
    with refused(IN_PLACE):
        copy.sum().backward()
    with torch.no_grad():
        ops.double_(x)
    assert x.tolist() == [2, 2]


def test_out(x):
    out = torch.zeros_like(x, requires_grad=False)
    with pytest.raises(RuntimeError, match=r"fill\(\): functions with out=... arguments don't"):
        ops.fill(x, out=out)
    assert out.tolist() == [0, 0]
    assert ops.fill(x.detach(), out=out).tolist() == [2, 2]


def test_derivatives_take_its_place(operators, x):
    def formula(ctx, grad_double, grad_three):
        return 2 * grad_double

    library.register_autograd("test_refusals::split", formula, lib=operators)
    ops.split(x)[0].sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_a_formula_of_torch_takes_its_place(tmp_path):
    """The dispatcher would warn, once per process, about a replaced kernel."""
    program = """
import torch
from foo_ops import library

kernel = library.elementwise_kernel(lambda x: 2 * x)
library.define("test_refusals::of_torch", "(Tensor x) -> Tensor")
library.register_kernel("test_refusals::of_torch", ("cpu", "foo"), kernel)
torch.library.register_autograd("test_refusals::of_torch", lambda ctx, grad: 7 * grad)
for device in ("cpu", "foo"):
    x = torch.ones(2, device=device, requires_grad=True)
    torch.ops.test_refusals.of_torch(x).sum().backward()
    assert x.grad.tolist() == [7, 7]
    assert torch.ops.test_refusals.of_torch(x.detach()).tolist() == [2, 2]
"""
    assert run(program, tmp_path) == ("", "")


def test_a_composite_takes_its_place(operators, x):
    def composite(x):
        return 2 * x, torch.full_like(x, 3, dtype=torch.int64)

    library.register_autograd("test_refusals::split", composite=composite, lib=operators)
    assert torch.func.grad(lambda x: ops.split(x)[0].sum())(x.detach()).tolist() == [2, 2]
    assert torch.func.jvp(lambda x: ops.split(x)[0], (x,), (x,))[1].tolist() == [2, 2]


def test_variant_autograd_takes_its_place(operators, x):
    library.define("test_refusals::double", "(Tensor x) -> Tensor", lib=operators)
    double = library.elementwise_kernel(lambda x: 2 * x, backward=lambda grad, x: 2 * grad)
    library.register_kernel("test_refusals::double", DEVICES, double, lib=operators)
    library.register_variant_autograd("test_refusals::double_", lib=operators)
    ops.double_(x.clone()).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_formulas_that_came_first_stay(x):
    lib = torch.library.Library("test_refusals_first", "FRAGMENT")
    library.define("test_refusals_first::double", "(Tensor x) -> Tensor", lib=lib)
    library.register_autograd("test_refusals_first::double", lambda ctx, grad: 2 * grad, lib=lib)
    double = library.elementwise_kernel(lambda x: 2 * x)
    library.register_kernel("test_refusals_first::double", DEVICES, double, lib=lib)
    torch.ops.test_refusals_first.double(x).sum().backward()
    assert x.grad.tolist() == [2, 2]
    lib._destroy()


def test_formulas_of_torch_library_take_its_place(operators, x):
    def formula(ctx, grad_double, grad_three):
        return 2 * grad_double

    # The dispatcher warns once per process about a replaced kernel.
    torch.library.register_autograd("test_refusals::split", formula, lib=operators)
    ops.split(x)[0].sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_compiled_calls_that_need_none(x):
    graph = torch.compile(lambda x: ops.split(x)[0] + 1, backend="aot_eager", fullgraph=True)
    assert graph(x.detach()).tolist() == [3, 3]
    with torch.no_grad():
        assert graph(x).tolist() == [3, 3]
