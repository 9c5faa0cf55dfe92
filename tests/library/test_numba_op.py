"""numba_op makes an operator from one function: variants, gradients, compilation, cpu and foo."""

import pytest
import torch
from support.parts import whole

from foo_ops import library, testing

pytestmark = pytest.mark.usefixtures("one_thread")


FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def operators():
    lib = library.Library("foo_numba", "FRAGMENT")

    @library.numba_op("foo_numba::soft", backward=soft_gradient, lib=lib)
    def soft(x: float, y: float, slope: float = 0.5, shift: float | None = None) -> float:
        value = x * y if x > 0 else slope * x * y
        if shift is not None:
            value += shift
        return value

    @library.numba_op("foo_numba::parts", lib=lib)
    def parts(x: float, digits: int = 0, negate: bool = False) -> tuple[float, bool, int]:
        whole = int(x * 10**digits // 1)
        return (-x if negate else x), x < 0, whole

    @library.elementwise_kernel(backward=cubed_times_second)
    def cubed_times_first(grad, x, y, factor):
        return 3 * factor * x * x * y * grad, factor * x * x * x * grad

    @library.numba_op("foo_numba::cubed_times", backward=cubed_times_first, lib=lib)
    def cubed_times(x: float, y: float, factor: float = 1.0) -> float:
        return factor * x * x * x * y

    @library.numba_op("foo_numba::masked_power", backward=masked_power_gradient, lib=lib)
    def masked_power(x: float, keep: bool, exponent: int) -> float:
        return x**exponent if keep else 0.0

    @library.numba_op("foo_numba::split", backward=lambda g, _, x: g if x > 0 else -g, lib=lib)
    def split(x: float) -> tuple[float, bool]:
        return abs(x), x > 0

    @library.numba_op("foo_numba::gcd", lib=lib)
    def gcd(a: int, b: int) -> int:
        while b != 0:
            a, b = b, a % b
        return abs(a)

    @library.numba_op("foo_numba::conjugate", lib=lib)
    def conjugate(z: complex) -> complex:
        return z.conjugate()

    return lib


def soft_gradient(grad, x, y, slope, shift):
    factor = 1.0 if x > 0 else slope
    return grad * y * factor, grad * x * factor


def cubed_times_second(grad_x, grad_y, grad, x, y, factor):
    """Return the three gradients of the backward kernel: for grad, x and y."""
    by_grad = 3 * factor * x * x * y * grad_x + factor * x * x * x * grad_y
    by_x = 6 * factor * x * y * grad * grad_x + 3 * factor * x * x * grad * grad_y
    return by_grad, by_x, 3 * factor * x * x * grad * grad_x


def masked_power_gradient(grad, x, keep, exponent):
    return (grad * exponent * x ** (exponent - 1) if keep else 0.0), 0.0, 0.0


def soft_reference(x, y, slope=0.5, shift=None):
    x, y = x.double(), y.double()
    return torch.where(x > 0, x * y, slope * x * y) + (shift or 0)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def check_soft(output, x, y, dtype, **options):
    expected = soft_reference(x, y, **options)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    roundings = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(computed).eps
    product = (x.double() * y.double()).abs() * max(1, abs(options.get("slope", 0.5)))
    magnitude = product + abs(options.get("shift") or 0)
    budget = roundings * magnitude + torch.finfo(dtype).smallest_normal
    testing.spec.assert_within("soft", output.double(), expected, budget)


SHAPES = [((), ()), ((7,), (7,)), ((0, 3), (3,)), ((5, 1), (1, 67)), ((2, 3, 33), (33,))]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_values(shapes, dtype, device):
    x, y = (random(*shape, dtype=dtype) for shape in shapes)
    for options in ({}, {"slope": -2.0}, {"shift": 0.75}, {"slope": 3.0, "shift": -1.5}):
        output = torch.ops.foo_numba.soft(x.to(device), y.to(device), **options)
        assert (output.dtype, output.device.type) == (dtype, device)
        check_soft(output.cpu(), x, y, dtype, **options)


@pytest.mark.parametrize("layout", testing.LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts(layout, device):
    x, y = layout(random(3, 4, 5)), layout(random(4, 1))
    moved = (testing.copy_with_layout(tensor, device) for tensor in (x, y))
    check_soft(torch.ops.foo_numba.soft(*moved).cpu(), x, y, torch.float32)


def test_promotion(device):
    x, y = random(5, dtype=torch.float32), random(5, dtype=torch.float64)
    output = torch.ops.foo_numba.soft(x.to(device), y.to(device))
    assert output.dtype == torch.float64
    check_soft(output.cpu(), x, y, torch.float64)


def test_several_results(device):
    x = random(4, 6).T
    values, negative, whole = torch.ops.foo_numba.parts(x.to(device), digits=1, negate=True)
    assert torch.equal(values.cpu(), -x)
    assert torch.equal(negative.cpu(), x < 0)
    assert torch.equal(whole.cpu(), torch.floor(x * 10).long())
    assert values.stride() == negative.stride() == whole.stride() == x.stride()


def test_several_outs(device):
    x = random(4, 6).to(device)
    outs = [
        torch.empty(0, dtype=dtype, device=device)
        for dtype in (torch.float32, torch.bool, torch.int64)
    ]
    results = torch.ops.foo_numba.parts.out(x, out0=outs[0], out1=outs[1], out2=outs[2])
    assert all(result is out for result, out in zip(results, outs))
    for out, expected in zip(outs, torch.ops.foo_numba.parts(x)):
        assert torch.equal(out, expected)


def test_integers(device):
    a, b = torch.tensor([12, -18, 0, 7]), torch.tensor([18, 24, 5, 7], dtype=torch.int32)
    result = torch.ops.foo_numba.gcd(a.to(device), b.to(device))
    assert torch.equal(result.cpu(), torch.gcd(a, b))
    assert result.dtype == torch.int64


def test_complex(device):
    z = torch.randn(3, 5, dtype=torch.complex64)
    assert torch.equal(torch.ops.foo_numba.conjugate(z.T.to(device)).cpu(), z.T.conj_physical())


def test_in_place_and_out(device):
    x, y = random(4, 6), random(6)
    expected = torch.ops.foo_numba.soft(x, y, slope=2.0)
    target = x.clone().to(device)
    assert torch.ops.foo_numba.soft_(target, y.to(device), slope=2.0) is target
    assert torch.equal(target.cpu(), expected)
    assert target._version == 1
    out = torch.empty(6, 4, dtype=torch.float64, device=device).T
    torch.ops.foo_numba.soft.out(x.to(device), y.to(device), slope=2.0, out=out)
    assert torch.equal(out.cpu(), expected.double())


def test_forms():
    """An in-place variant exists if the result can replace the first tensor."""
    assert str(torch.ops.foo_numba.soft.default._schema) == (
        "foo_numba::soft(Tensor x, Tensor y, *, float slope=0.5, float? shift=None) -> Tensor"
    )
    assert sorted(torch.ops.foo_numba.soft.overloads()) == ["default", "out"]
    assert str(torch.ops.foo_numba.soft_.default._schema) == (
        "foo_numba::soft_(Tensor(a!) x, Tensor y, *, float slope=0.5, float? shift=None)"
        " -> Tensor(a!)"
    )
    assert not hasattr(torch.ops.foo_numba, "parts_")


def test_gradients(device):
    x = torch.randn(5, 1, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(7, dtype=torch.float64, device=device, requires_grad=True)

    def function(x, y):
        return torch.ops.foo_numba.soft(x, y, slope=-0.25, shift=1.0)

    assert torch.autograd.gradcheck(function, (x, y))
    wide = torch.randn(5, 7, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, y: torch.ops.foo_numba.soft_(x.clone(), y, slope=-0.25), (wide, y)
    )


def test_gradients_of_other_dtypes(device):
    x = random(4, dtype=torch.bfloat16).to(device).requires_grad_()
    y = random(4).to(device).requires_grad_()
    torch.ops.foo_numba.soft(x, y).sum().backward()
    assert (x.grad.dtype, y.grad.dtype) == (torch.bfloat16, torch.float32)
    factor = torch.where(x > 0, 1.0, 0.5).detach()
    torch.testing.assert_close(y.grad, x.detach().float() * factor, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, (y.detach() * factor).bfloat16(), rtol=0, atol=0)


def test_second_derivative_of_a_function(device):
    x = torch.ones(3, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.ops.foo_numba.soft(x, x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError) as error:
        grad.sum().backward()
    assert str(error.value) == (
        "foo_numba::soft: backward= has no derivative; pass elementwise_kernel(function, "
        "backward=...) as backward=, or register a formula with "
        "foo_ops.library.register_autograd instead"
    )


def test_second_derivative_of_a_kernel(device):
    """A ``backward=`` kernel may itself have a ``backward=``."""
    x = torch.randn(5, 1, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)

    def function(x, y):
        return torch.ops.foo_numba.cubed_times(x, y, factor=0.5)

    assert torch.autograd.gradcheck(function, (x, y))
    assert torch.autograd.gradgradcheck(function, (x, y))
    assert str(torch.ops.foo_numba.cubed_times_backward_backward.default._schema) == (
        "foo_numba::cubed_times_backward_backward(Tensor grad_grad0, Tensor grad_grad1, "
        "Tensor grad0, Tensor x, Tensor y, float factor) -> (Tensor, Tensor, Tensor)"
    )
    (first,) = torch.autograd.grad(function(x, y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="foo_numba::cubed_times_backward: backward="):
        torch.autograd.grad(second.sum(), x)


def test_gradients_beside_a_mask_and_integers(device):
    """Masks and integers are promoted as in the operator itself, and get no gradient."""
    x = torch.tensor([1.5, -2.0, 3.0], device=device, requires_grad=True)
    keep = torch.tensor([True, False, True], device=device)
    exponent = torch.tensor([[2], [3]], device=device)
    output = torch.ops.foo_numba.masked_power(x, keep, exponent)
    assert output.dtype == torch.float32
    values, kept = x.detach(), keep.float()
    torch.testing.assert_close(output.detach(), values**exponent * kept, rtol=1e-6, atol=0)
    output.sum().backward()
    torch.testing.assert_close(x.grad, (2 * values + 3 * values**2) * kept, rtol=1e-6, atol=0)


def test_gradients_of_numbers_beside_tensors(device):
    """A tensor without dimensions does not widen others; its gradient keeps its dtype."""
    x = torch.randn(4, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = torch.tensor(3.0, dtype=torch.float64, device=device, requires_grad=True)
    output = torch.ops.foo_numba.soft(x, y, slope=1.0)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert (x.grad.dtype, y.grad.dtype, y.grad.shape) == (torch.bfloat16, torch.float64, ())
    assert x.grad.tolist() == [3.0] * 4
    torch.testing.assert_close(y.grad.item(), x.detach().double().sum().item(), rtol=0.02, atol=0)


def test_gradient_through_some_results(device):
    """The kernel gets zeros for results without a gradient."""
    x = torch.tensor([1.5, -2.0], device=device, requires_grad=True)
    value, sign = torch.ops.foo_numba.split(x)
    assert not sign.requires_grad
    (2 * value).sum().backward()
    assert x.grad.tolist() == [2.0, -2.0]


def test_gradient_of_a_real_input_with_a_complex_result(device):
    lib = library.Library("foo_numba_complex", "FRAGMENT")
    lib.define("turned(Tensor x) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    kernel = library.elementwise_kernel(
        lambda x: x * 2j,
        dtypes=[torch.float64],
        result_type=torch.complex128,
        backward=lambda grad, x: grad * -2j,
    )
    library.register_kernel("foo_numba_complex::turned", ("cpu", "foo"), kernel, lib=lib)
    x = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(torch.ops.foo_numba_complex.turned, x)


def test_out_with_a_gradient(device):
    x = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="arguments don't support automatic differentiation"):
        torch.ops.foo_numba.soft.out(x, x, out=torch.empty(3, device=device))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad, device):
    x = random(3, 1).to(device).requires_grad_(requires_grad)
    y = random(4).to(device)
    for call, args, keywords in (
        (torch.ops.foo_numba.soft.default, (x, y), {"shift": 1.0}),
        (torch.ops.foo_numba.parts.default, (y,), {"digits": 1}),
    ):
        results = library.opcheck(call, args, keywords)
        assert results == dict.fromkeys(results, "SUCCESS")
        assert len(results) == 4


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [True, *whole(False)])
def test_compiled(dynamic, device):
    def function(x, y):
        soft = torch.ops.foo_numba.soft(x * 2, y) + 1
        values, negative, _ = torch.ops.foo_numba.parts(soft.detach())
        return (values + soft).where(negative, 0)

    backend = "inductor" if device == "cpu" else "aot_eager"
    graph = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows, columns in ((5, 7), (9, 4)) if dynamic else ((5, 7),):
        results = []
        for call in (function, graph):
            # Multiples of 1/4: their products and sums are exact in any order.
            x = (torch.arange(rows, device=device) / 4 - 1)[:, None].requires_grad_()
            y = (torch.arange(columns, device=device) / 4 - 0.5).requires_grad_()
            output = call(x, y)
            output.sum().backward()
            results.append((output.detach(), x.grad, y.grad))
        torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_real_result_of_complex_numbers(dtype, device):
    @library.numba_op("foo_numba::modulus")
    def modulus(z: complex) -> float:
        return abs(z)

    result = modulus(torch.tensor([3 + 4j], dtype=dtype, device=device))
    assert result.dtype == dtype.to_real()
    assert result.tolist() == [5]


def test_forward_mode_is_refused_where_there_are_no_derivatives(device):
    """torch.library's operators silently drop the tangent."""
    x = torch.ones(3, device=device)
    message = "foo_numba::soft: backward= has no derivative"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(torch.func.grad(lambda x: torch.ops.foo_numba.soft(x, x).sum()), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=message), torch.no_grad():
            torch.ops.foo_numba.soft_backward(x, x, dual, 0.5, None)
