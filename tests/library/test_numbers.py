"""Numbers of any type (Scalar), and lists of numbers, as arguments of kernels."""

import itertools
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from foo_ops import library

library.define("foo_numbers::axpy", "(Tensor x, Tensor y, *, Scalar alpha=1) -> Tensor")
AXPY_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.uint8),
    *(torch.complex64, torch.complex128),
)


def axpy_gradients(grad, x, y, alpha):
    return alpha.conjugate() * grad, grad


library.register_kernel(
    "foo_numbers::axpy",
    ("cpu", "foo"),
    library.elementwise_kernel(
        lambda x, y, alpha: alpha * x + y, dtypes=AXPY_DTYPES, backward=axpy_gradients
    ),
)
axpy = torch.ops.foo_numbers.axpy

library.define(
    "foo_numbers::shift_rows",
    "(Scalar? by, Tensor x, int[] steps, float[2] scale, SymInt more=0, bool? negate=None)"
    " -> Tensor",
)


@library.register_fake("foo_numbers::shift_rows")
def shift_rows_fake(by, x, steps, scale, more=0, negate=None):
    return x.new_empty(x.shape[0] + more, *x.shape[1:])


@library.register_kernel("foo_numbers::shift_rows", ("cpu", "foo"))
@library.tile_kernel(tiles=lambda output: output.rows)
def shift_rows(by, x, steps, scale, more, negate, output, rows):
    first, second = scale
    total = 0
    for step in steps:
        total += step
    for row in rows:
        for i in range(x.shape[-1]):
            value = x[row % x.shape[0], i] * first + second * steps[row % len(steps)] + steps[-1]
            if by is not None:
                value += by
            output[row, i] = -value if negate is not None and negate else value + total + more


def shifted_rows(by, x, steps, scale, more=0, negate=None):
    rows = torch.arange(x.shape[0] + more)
    per_row = torch.tensor(steps)[rows % len(steps)][:, None]
    value = x[rows % x.shape[0]] * scale[0] + scale[1] * per_row + steps[-1] + (by or 0)
    return (-value if negate else value + sum(steps) + more).to(x.dtype)


@library.numba_op(
    "foo_numbers::polynomial",
    backward=lambda grad, x, coefficients, shifts: grad * slope(x, coefficients),
)
def polynomial(
    x: float, coefficients: list[float] = (1.0, 0.0), shifts: tuple[int, int] = (0, 0)
) -> float:
    total = coefficients[0]
    for i in range(1, len(coefficients)):
        total = total * x + coefficients[i]
    before, after = shifts
    return total + before - after


def slope(x, coefficients):
    total, degree = 0.0 * x, len(coefficients) - 1
    for i in range(degree):
        total = total * x + coefficients[i] * (degree - i)
    return total


@pytest.mark.parametrize("dtype", AXPY_DTYPES, ids=str)
def test_scalar_of_an_elementwise_kernel(dtype, device):
    """A Scalar has the tensors' compute type: with int64, an integer does not become a float."""
    x = torch.arange(7).to(dtype)
    for alpha in (2, True, *([2.5] if dtype.is_floating_point else [])):
        result = axpy(x.to(device), x.to(device), alpha=alpha)
        assert result.dtype == dtype
        assert torch.equal(result.cpu(), alpha * x + x)
    large = torch.tensor([2**62 + 1, -(2**62) - 1])
    assert torch.equal(axpy(large, large * 0, alpha=1), large)


def test_complex_scalar(device):
    z = torch.randn(5, dtype=torch.complex128, device=device, requires_grad=True)
    torch.testing.assert_close(axpy(z, z, alpha=2 - 1j), z * (3 - 1j))
    assert torch.autograd.gradcheck(lambda z: axpy(z, z, alpha=2 - 1j), z)


def test_gradients_with_a_scalar(device):
    x = torch.randn(5, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: axpy(x, y, alpha=-1.5), (x, y))
    mapped = torch.vmap(lambda y: axpy(x, y, alpha=3))(y)
    torch.testing.assert_close(mapped, 3 * x + y)


@pytest.mark.parametrize("place", ["cpu", "foo", "meta"])
def test_wrong_scalar(place):
    for dtype, alpha, what, got in (
        (torch.int64, 2.5, "an integer", "a float"),
        (torch.int8, 1j, "an integer", "a complex number"),
        (torch.float32, 1j, "real", "a complex number"),
    ):
        x = torch.ones(3, dtype=dtype, device=place)
        message = (
            f"axpy: alpha must be {what} since the dtype of x and y is {str(dtype)[6:]}, got {got}"
        )
        with pytest.raises(TypeError, match=rf"\A{re.escape(message)}\Z"):
            axpy(x, x, alpha=alpha)
    message = "shift_rows: by must be real since the dtype of x is float64, got a complex number"
    x = torch.ones(2, 3, dtype=torch.float64, device=place)
    with pytest.raises(TypeError, match=rf"\A{re.escape(message)}\Z"):
        torch.ops.foo_numbers.shift_rows(1j, x, [1], [1.0, 2.0])


def test_tensor_in_the_place_of_a_scalar():
    """torch's own schemas refuse the tensor."""
    x = torch.ones(3)
    with pytest.raises(
        RuntimeError, match="Expected a value of type 'number' for argument 'alpha'"
    ):
        axpy(x, x, alpha=torch.tensor(2.0))


@pytest.mark.parametrize(
    "args",
    [
        (None, [1], [1.0, 0.5]),
        (2, [1, -2, 3], [2.0, 0.0], 2),
        (0.5, [1, 2], [1.0, 1.0], 1, True),
        (0.5, (4,), (1.0, 1.0), 0, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_tile_kernel(args, dtype, device):
    by, *rest = args
    x = torch.arange(12.0).view(3, 4).to(dtype)
    result = torch.ops.foo_numbers.shift_rows(by, x.to(device), *rest)
    assert result.dtype == dtype
    assert torch.equal(result.cpu(), shifted_rows(by, x, *rest))
    stacked = torch.stack([x, x + 1]).to(device)
    mapped = torch.vmap(lambda x: torch.ops.foo_numbers.shift_rows(by, x, *rest))(stacked)
    assert torch.equal(mapped[1].cpu(), shifted_rows(by, x + 1, *rest))


def test_scalar_of_a_tile_kernel_does_not_promote(device):
    """A schema's float arrives as float64, a Scalar in the compute type of the first tensor."""
    library.define("foo_numbers::plus", "(Tensor x, Scalar a, float b) -> (Tensor, Tensor)")
    library.register_fake("foo_numbers::plus", lambda x, a, b: (x.clone(), x.double()))

    @library.register_kernel("foo_numbers::plus", ("cpu", "foo"))
    @library.tile_kernel
    def plus(x, a, b, narrow, wide, rows):
        for row in rows:
            narrow.flat[row], wide.flat[row] = x.flat[row] + a, x.flat[row] + b

    x = torch.tensor(1.0, device=device)
    narrow, wide = torch.ops.foo_numbers.plus(x, 2**-30, 2**-30)
    assert narrow.item() == 1
    assert wide.item() == 1 + 2**-30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_lists_of_an_elementwise_kernel(dtype, device):
    x = (torch.arange(8) / 4).to(dtype).to(device)
    assert torch.equal(polynomial(x), x)
    expected = (3 * x.double() ** 2 + 0.5 * x.double() + 2 + 4).to(dtype)
    result = polynomial(x, coefficients=[3.0, 0.5, 2.0], shifts=[5, 1])
    torch.testing.assert_close(result, expected)
    assert torch.equal(polynomial(x, coefficients=[3.0, 0.5, 2.0], shifts=(5, 1)), result)
    assert polynomial(x, coefficients=[7.0]).tolist() == [7] * 8


def test_derivatives_with_lists(device):
    x = torch.randn(2, 5, dtype=torch.float64, device=device, requires_grad=True)

    def function(x):
        return polynomial(x, coefficients=[1.0, -2.0, 0.5, 3.0])

    assert torch.autograd.gradcheck(function, x)
    mapped = torch.vmap(torch.func.grad(lambda x: function(x).sum()))(x.detach())
    torch.testing.assert_close(mapped, 3 * x.detach() ** 2 - 4 * x.detach() + 0.5)


def test_schemas():
    assert str(polynomial.default._schema) == (
        "foo_numbers::polynomial(Tensor x, *, float[] coefficients=[1., 0.], "
        "SymInt[2] shifts=[0, 0]) -> Tensor"
    )
    assert str(torch.ops.foo_numbers.polynomial_backward.default._schema) == (
        "foo_numbers::polynomial_backward(Tensor grad0, Tensor x, float[] coefficients,"
        " SymInt[2] shifts) -> Tensor"
    )

    @library.numba_op("foo_numbers::scaled")
    def scaled(x: float, by: int | float = 1, times: int | None = None) -> float:
        return x * by

    assert str(scaled.default._schema) == (
        "foo_numbers::scaled(Tensor x, *, Scalar by=1, SymInt? times=None) -> Tensor"
    )
    assert scaled(torch.ones(1), by=2.5).item() == scaled(torch.ones(1, dtype=torch.half), by=2.5)


@pytest.mark.parametrize("place", ["cpu", "foo", "meta"])
def test_wrong_length(place):
    x = torch.ones(2, 3, device=place)
    for call, message in (
        (lambda: polynomial(x, shifts=[1, 2, 3]), "polynomial: shifts must have 2 numbers, got 3"),
        (
            lambda: torch.ops.foo_numbers.shift_rows(None, x, [1], [1.0]),
            "shift_rows: scale must have 2 numbers, got 1",
        ),
    ):
        with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z"):
            call()


def test_opcheck(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    for call, args, keywords in (
        (axpy.default, (x, x.detach()), {"alpha": 2}),
        (polynomial.default, (x,), {"coefficients": [1.0, 2.0, 3.0]}),
        (torch.ops.foo_numbers.shift_rows.default, (1, x.detach(), [1, 2], [1.0, 2.0], 3), {}),
    ):
        assert set(library.opcheck(call, args, keywords).values()) == {"SUCCESS"}


@pytest.mark.usefixtures("fresh_compiler")
def test_dynamic_integers_do_not_compile_again(device):
    def function(x, n):
        shifted = torch.ops.foo_numbers.shift_rows(None, x, [1, 2], [1.0, 2.0], n)
        return polynomial(shifted, coefficients=[2.0, 0.0], shifts=[n, n])

    counter = CompileCounter()
    graph = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for n in (2, 3, 5, 7):
        x = torch.randn(n + 3, 4, device=device)
        torch.testing.assert_close(graph(x, n), function(x, n))
    assert counter.frame_count == 1


serial = itertools.count()


def register(kernel, schema):
    name = f"foo_numbers::f{next(serial)}"
    library.define(name, schema)
    library.register_fake(name, lambda x, *more: x.new_empty(x.shape))
    library.register_kernel(name, ("cpu", "foo"), kernel)
    return getattr(torch.ops.foo_numbers, name.partition("::")[2])


def behind(x, c):
    return x + c[len(c)]


def behind_in_tiles(x, c, y, rows):
    for row in rows:
        y.flat[row] = c[len(c)]


@pytest.mark.parametrize(
    "kernel", [library.elementwise_kernel(behind), library.tile_kernel(behind_in_tiles)]
)
@pytest.mark.parametrize("type_", ["int[]", "float[]"])
def test_index_outside(kernel, type_, device):
    call = register(kernel, f"(Tensor x, {type_} c) -> Tensor")
    with (
        library.check_bounds(),
        pytest.raises(
            IndexError, match=r"c\[2\] is outside of c, which has shape \[2\] \(.*c\[len"
        ),
    ):
        call(torch.ones(3, device=device), [1, 2] if type_ == "int[]" else [1.0, 2.0])


def at_two(x, c):
    return x + c[2]


def by_float(x, c):
    return x + c[x]


def writes(x, c, y, rows):
    c[0] = 1.0


@pytest.mark.parametrize(
    ("kernel", "schema", "message"),
    [
        (
            library.elementwise_kernel(at_two),
            "(Tensor x, int[2] c) -> Tensor",
            "wrong index: the list has 2 numbers, got index 2",
        ),
        (
            library.elementwise_kernel(by_float),
            "(Tensor x, int[] c) -> Tensor",
            "wrong index: an index must be an integer, got float32; int(...) converts a float",
        ),
        (
            library.tile_kernel(writes),
            "(Tensor x, float[] c) -> Tensor",
            "the items of a list cannot be written",
        ),
    ],
)
def test_use_that_does_not_compile(kernel, schema, message):
    call = register(kernel, schema)
    with pytest.raises((TypeError, RuntimeError), match=re.escape(message)):
        call(torch.ones(3), [1.0, 2.0] if "float[" in schema else [1, 2])


def test_scalar_without_a_tensor():
    message = (
        r"foo_numbers::f\d+: an operator with a Scalar must have a tensor that is not optional, "
        "which gives the Scalar its type, got none for s"
    )

    def kernel(x, s, y, tiles):
        pass

    with pytest.raises(TypeError, match=rf"\A{message}\Z"):
        register(library.tile_kernel(kernel, tiles=lambda y: 1), "(Tensor? x, Scalar s) -> Tensor")


def test_annotation_that_no_schema_has():
    message = (
        'must annotate c with float, int, bool, typing.Literal["a", "b"], int | float, '
        "list[float], list[int] or a tuple, or one of these and None, got"
    )
    for hint in (list[str], dict, tuple[int, float], str):

        def wrong(x: float, c: hint = None) -> float:
            return x

        with pytest.raises(TypeError, match=re.escape(message)):
            library.numba_op("foo_numbers::wrong", wrong)
