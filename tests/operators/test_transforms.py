"""Every operator under every transform of torch.func: values, and no slow-path warning."""

import pathlib

import pytest
import torch
import torch.nn.functional as F
from support.parts import whole

import foo_ops
from foo_ops import library

DTYPE = torch.float64
STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)
ANGLES = torch.tensor([[0.3, -1.2], [0.7, 2.0], [-0.4, 0.1]], dtype=DTYPE)
TARGET = torch.tensor([0, -100, 3])
INTEGERS = torch.tensor([[3, -7, 1, 120], [0, 5, -9, 2], [-128, 4, 8, 1]], dtype=torch.int8)


@pytest.fixture(scope="module", autouse=True)
def operators():
    """Define a user's operators, without and with second derivatives."""
    lib = library.Library("foo_transforms", "FRAGMENT")

    @library.elementwise_kernel(backward=lambda g, gg, x: (2 * x * g, 2 * g * gg))
    def square_gradient(grad, x):
        return 2 * x * grad

    @library.numba_op("foo_transforms::square", backward=square_gradient, lib=lib)
    def square(x: float) -> float:
        return x * x

    lib.define("row_sum(Tensor input) -> Tensor")
    torch.library.register_fake(
        "foo_transforms::row_sum", lambda input: input.new_empty(input.shape[:-1]), lib=lib
    )

    @library.register_kernel("foo_transforms::row_sum", ("cpu", "foo"), lib=lib)
    @library.tile_kernel
    def row_sum(input, output, rows):
        for row in rows:
            x, total = input.row(row), 0.0
            for i in range(input.shape[-1]):
                total += x[i]
            output[row] = total

    library.register_autograd(
        "foo_transforms::row_sum", composite=lambda input: input.sum(-1), lib=lib
    )
    yield
    lib._destroy()


def on(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


def math_attention(query, key, value, sinks=None):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    return scores.softmax(-1)[..., : key.shape[-2]] @ value


def packed_attention(x, sinks=(None, None)):
    pieces = [x[start:end].transpose(0, 1) for start, end in ((0, 2), (2, 5))]
    outputs = [math_attention(p, p, p, its).transpose(0, 1) for p, its in zip(pieces, sinks)]
    return torch.cat(outputs)


def ours_packed(x, sinks=None):
    starts = STARTS.to(x.device)
    return foo_ops.attention_varlen(
        x, x, x, starts, starts, sinks=sinks, max_seqlen_q=3, max_seqlen_k=3
    )


def rotated(x):
    cosine, sine = on(x.device, ANGLES.cos(), ANGLES.sin())
    first, second = x.unflatten(-1, (2, 2)).unbind(-2)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def root_mean_square(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


# Shapes of the inputs, the operator, and its equivalent in torch's own operators.
OPERATORS = {
    "abs": ((3, 4), foo_ops.abs, torch.abs),
    "silu_mul": ((3, 4), lambda x: foo_ops.silu_mul(x, x[0]), lambda x: F.silu(x) * x[0]),
    "rms_norm": (
        (3, 4),
        lambda x: foo_ops.rms_norm(x, x[0]),
        lambda x: root_mean_square(x) * x[0],
    ),
    "add_rms_norm": (
        (3, 4),
        lambda x: sum(foo_ops.add_rms_norm(x, 2 * x)),
        lambda x: root_mean_square(3 * x) + 3 * x,
    ),
    "layer_norm": (
        (3, 4),
        lambda x: foo_ops.layer_norm(x, x[0], x[1]),
        lambda x: F.layer_norm(x, (4,)) * x[0] + x[1],
    ),
    "add_layer_norm": (
        (3, 4),
        lambda x: sum(foo_ops.add_layer_norm(x, 2 * x)),
        lambda x: F.layer_norm(3 * x, (4,)) + 3 * x,
    ),
    "linear": (
        (3, 4),
        lambda x: foo_ops.linear(x, x.cos(), x.flatten()[:3]),
        lambda x: F.linear(x, x.cos(), x.flatten()[:3]),
    ),
    "linear_int8": (
        (3, 4),
        lambda x: foo_ops.linear_int8(x, *on(x.device, INTEGERS), x[1, :3], x[2, 1:]),
        lambda x: F.linear(x, on(x.device, INTEGERS)[0] * x[1, :3, None], x[2, 1:]),
    ),
    "rotary_embedding": (
        (3, 4),
        lambda x: foo_ops.rotary_embedding(x, *on(x.device, ANGLES.cos(), ANGLES.sin())),
        rotated,
    ),
    "softmax_cross_entropy": (
        (3, 4),
        lambda x: foo_ops.softmax_cross_entropy(x, TARGET.to(x.device), reduction="none"),
        lambda x: F.cross_entropy(x, TARGET.to(x.device), reduction="none"),
    ),
    "linear_cross_entropy": (
        (3, 4),
        lambda x: foo_ops.linear_cross_entropy(
            x, x.cos(), TARGET.to(x.device) % 3, reduction="none", softcap=2.0
        ),
        lambda x: F.cross_entropy(
            2 * F.linear(x, x.cos()).div(2).tanh(), TARGET.to(x.device) % 3, reduction="none"
        ),
    ),
    "attention": (
        (1, 2, 3, 2),
        lambda x: foo_ops.attention(x, x, x),
        lambda x: math_attention(x, x, x),
    ),
    "attention with sinks": (
        (1, 2, 3, 2),
        lambda x: foo_ops.attention(x, x, x, sinks=x[0, :, 0, 0]),
        lambda x: math_attention(x, x, x, x[0, :, 0, 0]),
    ),
    "scaled_dot_product_attention": (
        (1, 2, 3, 2),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: math_attention(x, x, x),
    ),
    "attention_varlen": ((5, 2, 2), ours_packed, packed_attention),
    "attention_varlen with sinks": (
        (5, 2, 2),
        lambda x: ours_packed(x, x[:2, :, 0]),
        lambda x: packed_attention(x, x[:2, :, 0]),
    ),
    "square": ((3, 4), lambda x: torch.ops.foo_transforms.square(x), torch.square),
    "row_sum": ((3, 4), lambda x: torch.ops.foo_transforms.row_sum(x), lambda x: x.sum(-1)),
}


def scalar(function):
    return lambda x: function(x).square().sum()


def jvp(function):
    return lambda x: torch.func.jvp(function, (x,), (torch.cos(x),))[1]


def vjp(function):
    def transformed(x):
        output, pull_back = torch.func.vjp(function, x)
        return pull_back(torch.cos(output.detach()))[0]

    return transformed


def linearized(function):
    def transformed(x):
        _, push_forward = torch.func.linearize(function, x)
        return push_forward(torch.cos(x))

    return transformed


def mapped(function):
    return lambda x: torch.func.vmap(function)(torch.stack([x, 2 * x, -x]))


def mapped_over_the_last(function):
    return lambda x: torch.func.vmap(function, in_dims=-1)(torch.stack([x, 2 * x], -1))


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=DTYPE))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight)


def of_parameters(function):
    module = Module(function)

    def transformed(x):
        def loss(weight):
            return torch.func.functional_call(module, {"weight": weight}, (x,)).square().sum()

        return torch.func.grad(loss)(torch.full((), 1.5, dtype=DTYPE, device=x.device))

    return transformed


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(scalar(f)),
    "vjp": vjp,
    "jvp": jvp,
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": lambda f: torch.func.hessian(scalar(f)),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(scalar(f))),
    "linearize": linearized,
    "vmap": mapped,
    "vmap over the last": mapped_over_the_last,
    "vmap of grad": lambda f: mapped(torch.func.grad(scalar(f))),
    "vmap of vmap": lambda f: mapped(mapped(f)),
    "jvp of grad": lambda f: jvp(torch.func.grad(scalar(f))),
    "functional_call": of_parameters,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_transform(device, name, transform, capfd):
    shape, ours, theirs = OPERATORS[name]
    if (device, name) == ("cpu", "scaled_dot_product_attention"):
        pytest.skip("on the CPU it is torch's own, which does less")
    x = torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(3))
    make = TRANSFORMS[transform]
    actual = make(ours)(x.to(device))
    # PyTorch prints this warning from C++, so Python's warnings do not catch it.
    assert "performance drop" not in capfd.readouterr().err
    assert actual.device.type == device
    torch.testing.assert_close(actual.cpu(), make(theirs)(x), atol=1e-12, rtol=1e-10)


def test_the_manual_names_what_is_compared():
    manual = (pathlib.Path(__file__).parents[2] / "docs/operators.md").read_text()
    of_the_kit = {
        "square": "an elementwise kernel of the kit",
        "row_sum": "a tile kernel of the kit",
    }
    operators = ", ".join(of_the_kit.get(name, name) for name in OPERATORS)
    assert f"| operators | {operators} |" in manual
    assert f"| transforms | {', '.join(TRANSFORMS)} |" in manual


def test_tangents_of_complex_numbers():
    z = torch.tensor([1 - 2j, 0.5j, -3.0], dtype=torch.complex128)
    tangent = torch.tensor([0.5 + 1j, 2.0, -1j], dtype=torch.complex128)
    actual = torch.func.jvp(foo_ops.abs, (z,), (tangent,))[1]
    torch.testing.assert_close(actual, torch.func.jvp(torch.abs, (z,), (tangent,))[1])


def test_gradients_of_dropout_differ_by_sample_as_randomness_says():
    query = torch.randn(4, 1, 2, 8, 16, dtype=DTYPE)

    def loss(query):
        return foo_ops.attention(query, query, query, dropout_p=0.5).square().sum()

    same = query[:1].expand(4, -1, -1, -1, -1)
    equal = torch.func.vmap(torch.func.grad(loss), randomness="same")(same)
    torch.testing.assert_close(equal[0], equal[1])
    different = torch.func.vmap(torch.func.grad(loss), randomness="different")(same)
    assert not torch.allclose(different[0], different[1])


def test_in_place_operators_are_mapped():
    @library.numba_op("foo_transforms::halved")
    def halved(x: float, y: float) -> float:
        return (x + y) / 2

    x, y = torch.randn(3, 2, 4), torch.randn(4, 3)
    target = x.clone()
    torch.func.vmap(torch.ops.foo_transforms.halved_, in_dims=(0, 1))(target, y)
    torch.testing.assert_close(target, (x + y.T.unsqueeze(1)) / 2)
    message = "foo_transforms::halved_: x is written, so torch.vmap must map it like"
    with pytest.raises(RuntimeError, match=message):
        torch.func.vmap(torch.ops.foo_transforms.halved_, in_dims=(None, 1))(target[0], y)


def test_a_mapped_number_does_not_promote():
    """A tensor without dimensions is promoted like a number."""
    numbers, x = torch.ones(3, dtype=DTYPE), torch.ones(2)
    result = torch.func.vmap(foo_ops.silu_mul, in_dims=(None, 0))(x, numbers)
    expected = foo_ops.silu_mul(x, numbers[0])
    assert result.dtype == expected.dtype == torch.float32
    assert result.shape == (3, 2)
