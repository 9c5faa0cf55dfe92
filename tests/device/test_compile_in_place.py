"""Operators that write a slice of a graph's input, such as a cache, compile without a copy."""

import pytest
import torch
from support.parts import whole

import foo_ops
from foo_ops import library

library.define("compile_in_place::halve_", "(Tensor(a!) input) -> ()")


@library.register_kernel("compile_in_place::halve_", ("cpu", "foo"))
@library.elementwise_kernel
def halve_(input):
    return input / 2


def rotate(cache, position, angle):
    torch.ops.foo.rotary_embedding_(cache[:, :, position : position + 1], angle.cos(), angle.sin())
    return cache[:, :, position : position + 1] * 2


def halve(cache, position, angle):
    torch.ops.compile_in_place.halve_(cache[:, :, position : position + 1])
    return cache[:, :, position : position + 1] + 1


def both(cache, position, angle):
    torch.ops.compile_in_place.halve_(cache[:, :, position : position + 1])
    return rotate(cache, position, angle)


def attend(cache, position, angle):
    rotate(cache, position, angle)
    past = cache[:, :, : position + 1]
    return foo_ops.attention(cache[:, :, position : position + 1], past, past)


def append(cache, position, angle):
    key = angle[:, None, None].expand(1, 8, 1, 32).repeat(1, 1, 1, 2)
    positions = torch.full((1,), position, device=cache.device)
    torch.ops.foo.cache_append(cache[..., :32], cache[..., 32:], *key.chunk(2, -1), positions)
    return cache[:, :, position] * 2


@pytest.mark.needs_compiler
@pytest.mark.parametrize("function", [rotate, halve, both, attend, append])
@pytest.mark.parametrize("dynamic", [True, *whole(None)])
def test_memory(function, dynamic):
    torch._dynamo.reset()
    torch.manual_seed(0)
    cache = torch.randn(1, 8, 1024, 64, device="foo")
    twin = cache.cpu().clone()
    angle = torch.rand(1, 32, device="foo")
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for position in (3, 5, 7):
        torch.foo.reset_peak_memory_stats()
        before = torch.foo.memory_allocated()
        result = compiled(cache, position, angle)
        if position == 7:  # compiled for all positions by now
            assert torch.foo.max_memory_allocated() - before < cache.nbytes / 16
        expected = function(twin, position, angle.cpu())
        torch.testing.assert_close(result.cpu(), expected)
        torch.testing.assert_close(cache.cpu(), twin)
