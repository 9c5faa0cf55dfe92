"""torch.vmap of tile kernels: by rows in one call, or by a loop, never with a warning."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import foo_ops
from foo_ops import library

LARGEST = 8


@pytest.fixture(autouse=True)
def no_slow_path(capfd):
    """Fail on PyTorch's slow-path warning, which C++ prints without Python's warnings."""
    yield
    assert "performance drop" not in capfd.readouterr().err


def define(name, schema, fake, kernel, **options):
    name = f"foo_tile_vmap::{name}"
    library.define(name, schema)
    library.register_fake(name, fake)
    library.register_kernel(name, ("cpu", "foo"), library.tile_kernel(kernel, **options))
    return getattr(torch.ops.foo_tile_vmap, name.partition("::")[2])


def weighted_sum(input, weight, output, rows):
    for row in rows:
        x, total = input.row(row), 0.0
        for i in range(input.shape[-1]):
            total += x[i] * weight[i]
        output.flat[row] = total


def weighted_sum_of_matrix(input, weight, output, rows):
    for row in rows:
        total = 0.0
        for i in range(input.shape[-1]):
            total += input[row, i] * weight[i]
        output[row] = total


def few_rows(input, weight):
    if input.shape[0] > LARGEST:
        raise ValueError(f"input must have at most {LARGEST} rows, got {input.shape[0]}")
    return input.new_empty(input.shape[0])


SCHEMA = "(Tensor input, Tensor weight) -> Tensor"
KERNELS = {
    "any_rank": (lambda input, weight: input.new_empty(input.shape[:-1]), weighted_sum),
    "matrix": (lambda input, weight: input.new_empty(input.shape[0]), weighted_sum_of_matrix),
    "few_rows": (few_rows, weighted_sum_of_matrix),
    # Right for a vector and wrong for a matrix.
    "vector": (lambda input, weight: input.new_empty(1), weighted_sum),
}
OPERATORS = {name: define(name, SCHEMA, *functions) for name, functions in KERNELS.items()}


class Calls(TorchDispatchMode):
    """Counts the calls of this file's operators."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_run = all(it.device.type != "meta" for it in args if isinstance(it, torch.Tensor))
        self.count += function.namespace == "foo_tile_vmap" and is_run
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize(
    ("name", "shape", "in_dims", "calls"),
    [
        ("any_rank", (3, 5, 4), (0, None), 1),
        ("any_rank", (3, 2, 5, 4), (0, None), 1),
        ("any_rank", (3, 4), (0, None), 1),
        ("any_rank", (5, 4, 3), (-1, None), 1),
        ("any_rank", (5, 3, 4), (1, None), 1),
        ("any_rank", (3, 5, 4), (0, 0), 3),
        ("matrix", (3, 5, 4), (0, None), 1),
        ("matrix", (5, 3, 4), (1, None), 1),
        ("few_rows", (3, 5, 4), (0, None), 3),
        ("few_rows", (2, 4, 4), (0, None), 1),
        ("vector", (3, 4), (0, None), 3),
        ("matrix", (0, 5, 4), (0, None), 0),
    ],
)
def test_rows(name, shape, in_dims, calls, device):
    input, weight = torch.randn(shape, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    weight = weight if in_dims[1] == 0 else weight[0]
    with Calls() as seen:
        result = torch.vmap(OPERATORS[name], in_dims)(input.to(device), weight.to(device))
    expected = torch.vmap(lambda x, w: (x * w).sum(-1), in_dims)(input, weight)
    torch.testing.assert_close(result.cpu(), expected.reshape(result.shape))
    assert result.shape == (*expected.shape, 1)[: expected.dim() + (name == "vector")]
    assert seen.count == calls


def test_rows_of_two_tensors():
    def scaled(input, scale, output, shifted, rows):
        for row in rows:
            x, y, z, factor = input.row(row), output.row(row), shifted.row(row), scale.flat[row]
            for i in range(input.shape[-1]):
                y[i] = factor * x[i]
                z[i] = factor + x[i]

    operator = define(
        "scaled",
        "(Tensor input, Tensor scale) -> (Tensor, Tensor)",
        lambda input, scale: (torch.empty_like(input), torch.empty_like(input)),
        scaled,
    )
    input, scale = torch.randn(3, 5, 4), torch.randn(5)
    for in_dims, scales, calls in (((0, None), scale, 1), ((0, 1), torch.randn(5, 3), 1)):
        with Calls() as seen:
            results = torch.vmap(operator, in_dims)(input, scales)
        expected = torch.vmap(lambda x, s: (s[:, None] * x, s[:, None] + x), in_dims)(input, scales)
        torch.testing.assert_close(results, expected)
        assert seen.count == calls


def scale_rows(input, scale, rows):
    for row in rows:
        x = input.row(row)
        for i in range(input.shape[-1]):
            x[i] *= scale.flat[row]


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("returns", ["()", "Tensor(a!)"])
def test_in_place(returns, device):
    fakes = {"()": lambda input, scale: None, "Tensor(a!)": lambda input, scale: input}
    operator = define(
        f"scale_rows_{len(returns)}_",
        f"(Tensor(a!) input, Tensor scale) -> {returns}",
        fakes[returns],
        scale_rows,
    )
    input, scale = torch.randn(5, 3, 4, device=device), torch.randn(3, 5, device=device)
    expected = (input * scale.T[:, :, None]).cpu()

    def scaled(x, s):
        result = operator(x, s)
        assert (result is None) == (returns == "()")
        return x if result is None else result

    result = torch.vmap(scaled, in_dims=(1, 0))(input, scale)
    torch.testing.assert_close(input.cpu(), expected)
    torch.testing.assert_close(result.cpu(), expected.transpose(0, 1))
    message = "input is written, so torch.vmap must map it like the other arguments"
    with pytest.raises(RuntimeError, match=message):
        torch.vmap(operator, in_dims=(None, 0))(input[:, 0], scale)
    torch.testing.assert_close(input.cpu(), expected)


def test_lists_in_place():
    def subtract(parameters, gradients, tiles):
        for tile in tiles:
            for i in range(parameters[tile].size):
                parameters[tile].flat[i] -= gradients[tile].flat[i]

    operator = define(
        "subtract_",
        "(Tensor(a!)[] parameters, Tensor[] gradients) -> ()",
        lambda parameters, gradients: None,
        subtract,
        tiles=lambda parameters: len(parameters),
    )
    first, second, gradient = torch.randn(3, 4), torch.randn(4, 3), torch.randn(4)
    expected = first - gradient, second - gradient[:, None]

    def step(x, y):
        operator([x, y], [gradient, gradient])
        return x

    torch.vmap(step, in_dims=(0, 1))(first, second)
    torch.testing.assert_close((first, second), expected)
    with pytest.raises(RuntimeError, match=r"parameters is written, so torch\.vmap must map it"):
        torch.vmap(step, in_dims=(0, None))(first, second[:, 0])


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_operators_of_ours_that_write(device):
    angles = torch.rand(5, 2, device=device)
    x = torch.randn(3, 2, 5, 4, device=device)
    turned = x.clone()
    torch.vmap(lambda it: torch.ops.foo.rotary_embedding_(it, angles.cos(), angles.sin()))(turned)
    torch.testing.assert_close(turned, foo_ops.rotary_embedding(x, angles.cos(), angles.sin()))
    caches = torch.zeros(2, 3, 1, 2, 8, 4, device=device)
    parts = torch.randn(2, 3, 1, 2, 1, 4, device=device)
    positions = torch.tensor([[1], [4], [7]], device=device)

    def append(keys, *others):
        torch.ops.foo.cache_append(keys, *others)
        return keys

    torch.vmap(append)(*caches, *parts, positions)
    for mapped, at in enumerate((1, 4, 7)):
        torch.testing.assert_close(caches[:, mapped, :, :, at], parts[:, mapped, :, :, 0])
    assert int(caches.count_nonzero()) == parts.numel()
