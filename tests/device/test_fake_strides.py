"""Results on foo have the sizes and strides of foo's fake tensors, and the CPU's."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

# A function and its weight's shape, for an input of four channels.
CONVOLUTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "conv2d": (torch.nn.functional.conv2d, (5, 4, 3, 3)),
    "conv_transpose2d": (torch.nn.functional.conv_transpose2d, (4, 5, 3, 3)),
    "conv3d": (torch.nn.functional.conv3d, (5, 4, 3, 3, 3)),
    "conv_transpose3d": (torch.nn.functional.conv_transpose3d, (4, 5, 3, 3, 3)),
}
LAYOUTS = list(itertools.product([False, True], repeat=2))


def layouts(result: Any) -> list[Any]:
    return [(leaf.shape, leaf.stride()) for leaf in tree_leaves(result) if leaf is not None]


def check(function: Callable[..., Any], *arguments: Any) -> None:
    mode = FakeTensorMode()
    there = tree_map_only(torch.Tensor, lambda tensor: to_foo(tensor), arguments)
    fakes = tree_map_only(torch.Tensor, mode.from_tensor, there)
    expected = layouts(function(*arguments))
    assert layouts(function(*there)) == expected
    with mode:
        announced = function(*fakes)
    assert layouts(announced) == expected
    assert all(leaf.device.type == "foo" for leaf in tree_leaves(announced) if leaf is not None)


def to_foo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("foo").requires_grad_(tensor.requires_grad)


def rand(*size: int, channels_last: bool) -> torch.Tensor:
    memory_format = CHANNELS_LAST[len(size)] if channels_last else torch.contiguous_format
    return torch.rand(size).contiguous(memory_format=memory_format)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, dtype: torch.dtype, layout: tuple[bool, bool]) -> None:
    function, size = CONVOLUTIONS[name]
    x = rand(2, 4, *[6] * (len(size) - 2), channels_last=layout[0]).to(dtype)
    weight = rand(*size, channels_last=layout[1]).to(dtype)
    check(function, x, weight)
    check(function, x, weight.requires_grad_())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_convolution(layout: tuple[bool, bool]) -> None:
    x, weight = rand(2, 4, 6, 6, channels_last=layout[0]), rand(5, 4, 3, 3, channels_last=layout[1])
    grad = rand(2, 5, 4, 4, channels_last=layout[0])

    def gradients(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        output = torch.nn.functional.conv2d(x, weight)
        return torch.autograd.grad(output, (x, weight), grad)

    check(gradients, grad, x, weight)


@pytest.mark.needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_compiled_convolution(name: str, layout: tuple[bool, bool]) -> None:
    function, size = CONVOLUTIONS[name]
    torch._dynamo.reset()
    x = rand(2, 4, 6, 6, channels_last=layout[0]).to("foo")
    weight = rand(*size, channels_last=layout[1]).to("foo")
    compiled = torch.compile(lambda x, weight: function(x, weight).relu(), fullgraph=True)
    with torch.no_grad():
        actual, expected = compiled(x, weight), function(x, weight).relu()
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()


def test_operators_that_differ_between_torchs_devices() -> None:
    x = rand(2, 4, 6, 6, channels_last=True)
    check(torch.nn.functional.pixel_shuffle, x, 2)
    check(lambda x: torch.nonzero_static(x, size=7), x)
    weight, indices, offsets = torch.rand(5, 3), torch.tensor([1, 2, 4]), torch.tensor([0, 2])
    for mode in (0, 1, 2):
        check(aten._embedding_bag, weight, indices, offsets, False, mode)
        check(aten._embedding_bag_forward_only, weight, indices, offsets, False, mode)
