"""Lists of tensors as arguments of tile kernels, read and written in place."""

import itertools
import math
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from foo_ops import library

library.define("foo_lists::weighted", "(Tensor[] tensors, float[] weights) -> Tensor")


@library.register_fake("foo_lists::weighted")
def weighted_fake(tensors, weights):
    return tensors[0].new_empty(tensors[0].shape)


@library.register_kernel("foo_lists::weighted", ("cpu", "foo"))
@library.tile_kernel(tiles=lambda output: output.shape[0])
def weighted(tensors, weights, output, rows):
    for row in rows:
        for i in range(output.shape[1]):
            output[row, i] = 0.0
        for position in range(len(tensors)):
            x = tensors[position].row(row)
            for i in range(output.shape[1]):
                output[row, i] += weights[position] * x[i]
        for x in tensors:
            output[row, 0] += x[row, 0] - tensors[-1][row, 0]


def weighted_sum(tensors, weights):
    total = sum(weight * x for weight, x in zip(weights, tensors))
    first = sum(x[:, :1] - tensors[-1][:, :1] for x in tensors)
    return torch.cat([total[:, :1] + first, total[:, 1:]], 1)


library.register_autograd("foo_lists::weighted", composite=weighted_sum)

ADAM = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] means, Tensor(c!)[] squares, *, float lr, "
    "float[2] betas=[0.9, 0.999], float eps=1e-8, float weight_decay=0.01, SymInt step=1) -> ()"
)
TILE = 100


def tiles_of(tensor):
    return (tensor.size + TILE - 1) // TILE


def tiles_of_all(params):
    count = 0
    for param in params:
        count += tiles_of(param)
    return count


def adam(params, grads, means, squares, lr, betas, eps, weight_decay, step, tiles):
    beta1, beta2 = betas
    for tile in tiles:
        which, part = 0, tile
        while part >= tiles_of(params[which]):
            part -= tiles_of(params[which])
            which += 1
        param, grad = params[which].flat, grads[which].flat
        mean, square = means[which].flat, squares[which].flat
        for i in range(part * TILE, min((part + 1) * TILE, params[which].size)):
            mean[i] = beta1 * mean[i] + (1 - beta1) * grad[i]
            square[i] = beta2 * square[i] + (1 - beta2) * grad[i] * grad[i]
            root = math.sqrt(square[i] / (1 - beta2**step)) + eps
            param[i] -= lr * (mean[i] / (1 - beta1**step) / root + weight_decay * param[i])


library.define("foo_lists::adam_", ADAM)
library.register_fake("foo_lists::adam_", lambda *lists, **options: None)
library.register_kernel(
    "foo_lists::adam_", ("cpu", "foo"), library.tile_kernel(adam, tiles=tiles_of_all)
)
library.define("foo_lists::adam_rows_", ADAM)
library.register_fake("foo_lists::adam_rows_", lambda *lists, **options: None)
library.register_kernel(
    "foo_lists::adam_rows_",
    ("cpu", "foo"),
    library.tile_kernel(adam, tiles=tiles_of_all, contiguous_rows=True),
)
adam_, adam_rows_ = torch.ops.foo_lists.adam_, torch.ops.foo_lists.adam_rows_


def parameters(device, count=5, dtype=torch.float64):
    """Return tensors of several sizes, one of them empty, some with strides."""
    shapes = [(7, 50), (0, 3), (1, 1), (4, 100), (33, 9)][:count]
    tensors = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
    if count > 4:
        tensors[4] = tensors[4].T.contiguous().T
    return tensors


@pytest.mark.parametrize("operator", [adam_, adam_rows_], ids=["strides", "rows"])
def test_written_in_place(operator, device):
    params, grads = parameters(device), [parameters(device) for _ in range(3)]
    means, squares = ([torch.zeros_like(it) for it in params] for _ in range(2))
    expected = [param.clone().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(expected, lr=0.1)
    for step, grads_of_step in enumerate(grads, 1):
        versions = [it._version for it in (*params, *grads_of_step, *means, *squares)]
        assert operator(params, grads_of_step, means, squares, lr=0.1, step=step) is None
        after = [it._version for it in (*params, *grads_of_step, *means, *squares)]
        written = [after - before for before, after in zip(versions, after)]
        assert written == [1] * 5 + [0] * 5 + [1] * 10
        for param, grad in zip(expected, grads_of_step):
            param.grad = grad
        optimizer.step()
        for param, wanted in zip(params, expected):
            torch.testing.assert_close(param, wanted.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_read(count, dtype, device):
    tensors = [(torch.arange(12.0).view(3, 4) + i).to(dtype).to(device) for i in range(count)]
    tensors[-1] = tensors[-1].T.contiguous().T
    weights = [float(i) for i in range(count)]
    result = torch.ops.foo_lists.weighted(tensors, weights)
    expected = weighted_sum([it.double() for it in tensors], weights)
    torch.testing.assert_close(result.double(), expected, rtol=0.02, atol=0)


def test_gradients_of_a_composite(device):
    tensors = [torch.randn(3, 4, dtype=torch.float64, device=device) for _ in range(3)]
    for it in tensors[:2]:
        it.requires_grad_()

    def function(*tensors):
        return torch.ops.foo_lists.weighted(list(tensors), [1.0, -2.0, 3.0])

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)
    mapped = torch.vmap(function, (0, None, 0))(
        torch.stack([tensors[0].detach()] * 2), tensors[1].detach(), torch.stack([tensors[2]] * 2)
    )
    torch.testing.assert_close(mapped[1], function(*(it.detach() for it in tensors)))


def test_results_do_not_depend_on_threads(device, one_thread):
    def run():
        torch.manual_seed(3)
        params, grads, means, squares = (parameters(device) for _ in range(4))
        adam_(params, grads, means, [it * it for it in squares], lr=0.1)
        return params

    alone = run()
    torch.set_num_threads(2)
    for one, other in zip(alone, run()):
        assert torch.equal(one, other)


def test_opcheck(device):
    params, grads, means, squares = (parameters(device, 2) for _ in range(4))
    squares = [it * it for it in squares]
    for call, args, keywords in (
        (adam_.default, (params, grads, means, squares), {"lr": 0.1}),
        (torch.ops.foo_lists.weighted.default, ([params[0], grads[0]], [1.0, 2.0]), {}),
    ):
        assert set(library.opcheck(call, args, keywords).values()) == {"SUCCESS"}


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(device):
    def function(params, grads, means, squares):
        adam_(params, [2 * it for it in grads], means, squares, lr=0.1)

    backend = "inductor" if device == "cpu" else "aot_eager"
    graph = torch.compile(function, backend=backend, fullgraph=True)
    lists = [parameters(device) for _ in range(4)]
    lists[3] = [it * it for it in lists[3]]
    others = [[it.clone() for it in tensors] for tensors in lists]
    graph(*lists)
    function(*others)
    for one, other in zip(itertools.chain(*lists), itertools.chain(*others)):
        torch.testing.assert_close(one, other)


def test_lists_that_share_memory_with_what_is_read(device):
    """The kernel reads the values from before the call."""
    whole = torch.arange(6.0, device=device)
    results = []
    for params, grads in (([whole[:5]], [whole[1:]]), ([whole[:5].clone()], [whole[1:].clone()])):
        others = [[torch.ones(5, device=device)] for _ in range(2)]
        kept = whole.clone()
        adam_(params, grads, *others, lr=0.5)
        results.append(params[0].clone())
        whole.copy_(kept)
    assert torch.equal(*results)


@pytest.mark.parametrize("place", ["cpu", "foo", "meta"])
def test_lists_that_do_not_fit(place):
    x = torch.ones(2, 3, device=place)
    for lists, error, message in (
        (([x], [], [x], [x]), ValueError, "grads must have at least one tensor, got none"),
        (
            ([x], [x, x.double()], [x], [x]),
            TypeError,
            "grads must have tensors of one dtype, got float32 and float64",
        ),
        (
            ([x], [x], [x], [x, x[0]]),
            ValueError,
            "squares must have tensors with the same number of dimensions, got 2 and 1",
        ),
    ):
        with pytest.raises(error, match=rf"\Aadam_: {re.escape(message)}\Z"):
            adam_(*lists, lr=0.1)


def test_lists_that_cannot_be_written(device):
    x, y, z, other = (torch.ones(2, 3, device=device) for _ in range(4))
    apart = "is written, so it must not have"
    for lists, message in (
        (([x, y, x], [z], [z], [other]), f"params {apart} tensors that share memory"),
        (
            ([x], [z], [x[:1]], [y]),
            "means must not share memory with params, since both are written",
        ),
        (([x[:1].expand(2, 3)], [z], [y], [z]), f"params {apart} elements that share memory"),
    ):
        with pytest.raises(RuntimeError, match=rf"\Aadam_: {re.escape(message)}"):
            adam_(*lists, lr=0.1)
        assert all((it == 1).all() for it in (x, y, z, other))
        with FakeTensorMode() as mode:
            fakes = [[mode.from_tensor(it) for it in each] for each in lists]
            with pytest.raises(RuntimeError, match=rf"\Aadam_: {re.escape(message)}"):
                adam_(*fakes, lr=0.1)


def test_lists_on_two_devices():
    x = torch.ones(2)
    with pytest.raises(ValueError, match=r"\Aadam_: grads must be on foo:0 as params is, got cpu"):
        adam_([x.to("foo")], [x], [x], [x], lr=0.1)


serial = itertools.count()


def register(kernel, schema):
    name = f"foo_lists::f{next(serial)}"
    library.define(name, schema)
    library.register_fake(name, lambda tensors, *more: tensors[0].new_empty(3))
    library.register_kernel(name, ("cpu", "foo"), kernel)
    return getattr(torch.ops.foo_lists, name.partition("::")[2])


def behind_list(tensors, output, tiles):
    for tile in tiles:
        output[0] = tensors[len(tensors) + tile][0]


def behind_tensor(tensors, output, tiles):
    for tile in tiles:
        output[0] = tensors[1][99 + tile]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (behind_list, "tensors[2] is outside of tensors, which has 2 tensors ("),
        (behind_tensor, "tensors[1][99] is outside of tensors[1], which has shape [3] ("),
    ],
)
def test_index_outside(function, message, device):
    kernel = library.tile_kernel(function, tiles=lambda tensors: 1)
    call = register(kernel, "(Tensor[] tensors) -> Tensor")
    with library.check_bounds(), pytest.raises(IndexError, match=re.escape(message)):
        call([torch.ones(3, device=device)] * 2)


def nothing(tensors, output, tiles):
    pass


def nothing_in_place(tensors, tiles):
    pass


@pytest.mark.parametrize(
    ("make", "schema", "message"),
    [
        (
            lambda: library.tile_kernel(nothing),
            "(Tensor[] tensors) -> Tensor",
            "tile_kernel must be given tiles=..., the number of tiles, if no tensor is always "
            "there",
        ),
        (
            lambda: library.tile_kernel(nothing_in_place, tiles=lambda tensors: 1),
            "(Tensor(a!)[] tensors) -> Tensor(a!)[]",
            "an operator that writes to a list of tensors must return nothing, -> (), got tensors",
        ),
        (
            lambda: library.tile_kernel(nothing, tiles=lambda tensors: 1),
            "(Tensor[] tensors) -> Tensor[]",
            "the results of a tile kernel must be tensors, got List[Tensor]",
        ),
        (
            lambda: library.elementwise_kernel(lambda tensors: 1.0),
            "(Tensor[] tensors) -> Tensor",
            "an elementwise kernel must not take a list of tensors, got tensors; use a tile_kernel",
        ),
        (
            lambda: library.tile_kernel(
                nothing,
                tiles=lambda tensors: 1,
                check=lambda tensors: True,
                refuse=lambda tensors: None,
            ),
            "(Tensor[] tensors) -> Tensor",
            "check must take arguments that the kernel has (output), got tensors in <lambda>",
        ),
    ],
)
def test_operators_that_are_refused(make, schema, message):
    with pytest.raises(TypeError, match=rf"\Afoo_lists::f\d+: {re.escape(message)}"):
        register(make(), schema)


library.define("foo_lists::parts", "(Tensor input, int first) -> (Tensor, Tensor[])")


@torch.library.impl("foo_lists::parts", ("cpu", "foo"))
def parts(input, first):
    return -input, [input[:first], input[first:]]


library.register_vmap_loop("foo_lists::parts")


def test_results_that_are_lists_are_mapped(device):
    x = torch.randn(5, 3, device=device)
    mapped = torch.vmap(lambda row: torch.ops.foo_lists.parts(row, 2), in_dims=1)
    negative, (first, second) = mapped(x)
    assert torch.equal(negative, -x.T)
    assert torch.equal(first, x.T[:, :2])
    assert torch.equal(second, x.T[:, 2:])
