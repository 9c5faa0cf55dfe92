"""Images interpolated at the points of a grid, as in warps and spatial transformers.

    output[n, c, p] = sum_k weight_k(grid[n, p]) * input[n, c, pixel_k(grid[n, p])]

The four pixels around a point are weighted by their distance, those outside of the image as zeros:
torch's grid_sample with align_corners=False.

Shows how to gather and scatter quickly. Only the kernel knows the points, so scattering the
gradient, four pixels for each channel, one number at a time is half as fast as PyTorch. Here a tile
has 16 channels of an image, in a layout in which the channels of a pixel are adjacent: a pixel is
one vector, and no other thread adds to it, without atomics. The gradient of the grid is a sum over
channels: the tiles' parts are added up at the end (``finish=``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define("examples::grid_sample", "(Tensor input, Tensor points) -> Tensor", tags=TAGS)
library.define(
    "examples::grid_sample_backward",
    "(Tensor grad_output, Tensor input, Tensor points) -> (Tensor grad_input, Tensor grad_points)",
    tags=TAGS,
)
# Channels of a tile (a float32 vector of 512 bits), and points that are transposed together.
CHANNELS, CHUNK = 16, 64


def grid_sample(input: Tensor, grid: Tensor) -> Tensor:
    """Sample ``input`` (N, C, H, W) at ``grid`` (N, P, Q, 2), giving (N, C, P, Q).

    A point is (x, y), from -1 at the left or upper edge of the image to 1 at the opposite edge.
    """
    output = torch.ops.examples.grid_sample(input, grid.flatten(1, 2))
    return output.unflatten(2, grid.shape[1:3])


# ---------------------------------------------------------------------------------------- kernels


def blocks_of(input: Any) -> Any:
    return (input.shape[1] + CHANNELS - 1) // CHANNELS


def count_tiles(input: Any) -> Any:
    return input.shape[0] * blocks_of(input)


def pixels_of(input: Any) -> Any:
    return input.shape[2] * input.shape[3]


def look_up(points: Any, row: Any, height: Any, width: Any) -> Any:
    """Return the first pixel around a point, possibly outside, and the point's distance from it."""
    u = ((points.row(row)[0] + 1) * language.cast(width, points) - 1) * 0.5
    v = ((points.row(row)[1] + 1) * language.cast(height, points) - 1) * 0.5
    left, top = math.floor(u), math.floor(v)
    # NaN, and points too far away for an integer, are outside.
    is_near = abs(left) < 1e9 and abs(top) < 1e9
    return (int(left), int(top), u - left, v - top) if is_near else (-9, -9, 0 * left, 0 * top)


def pixel(x: Any, y: Any, height: Any, width: Any) -> Any:
    """Return the index of a pixel, or that of the last one, of zeros, outside of the image."""
    return y * width + x if 0 <= x < width and 0 <= y < height else height * width


def gather_planes(planes: Any, input: Any, first: Any, count: Any) -> None:
    """Copy channels of an image so that a pixel's are adjacent; missing channels are zeros."""
    height, width = input.shape[2], input.shape[3]
    for i in range(height * width + 1):
        language.store(planes.row(i), 0, language.splat(language.zero(planes), CHANNELS))
    for c in range(count):
        for y in range(height):
            x = input.row((first + c) * height + y)
            for i in range(width):
                planes[y * width + i, c] = x[i]


def load(planes: Any, row: Any) -> Any:
    return language.load_vector(planes.row(row), 0, CHANNELS)


def scaled(planes: Any, row: Any, factor: Any, total: Any) -> Any:
    return language.fma(load(planes, row), language.splat(factor, CHANNELS), total)


def add_to(planes: Any, row: Any, vector: Any, factor: Any) -> None:
    total = language.fma(vector, language.splat(factor, CHANNELS), load(planes, row))
    language.store(planes.row(row), 0, total)


def product(one: Any, other: Any, zero: Any) -> Any:
    return language.reduce_add(language.fma(one, other, zero))


PLANES = library.scratch(lambda input: pixels_of(input) + 1, CHANNELS, like="input")


@library.register_kernel("examples::grid_sample", ("cpu", "foo"))
@library.tile_kernel(
    tiles=count_tiles,
    contiguous_rows=True,
    scratch={"planes": PLANES, "chunk": library.scratch(CHUNK, CHANNELS, like="input")},
)
def forward_kernel(
    input: Any, points: Any, output: Any, planes: Any, chunk: Any, tiles: Any
) -> None:
    channels, height, width = input.shape[1], input.shape[2], input.shape[3]
    blocks, size = blocks_of(input), points.shape[1]
    zero = language.splat(language.zero(planes), CHANNELS)
    for tile in tiles:
        n, c = tile // blocks, tile % blocks * CHANNELS
        first, count = n * channels + c, min(CHANNELS, channels - c)
        gather_planes(planes, input, first, count)
        for start in range(0, size, CHUNK):
            stop = min(start + CHUNK, size)
            for i in range(start, stop):
                x, y, right, down = look_up(points, n * size + i, height, width)
                left, up = 1 - right, 1 - down
                total = scaled(planes, pixel(x, y, height, width), left * up, zero)
                total = scaled(planes, pixel(x + 1, y, height, width), right * up, total)
                total = scaled(planes, pixel(x, y + 1, height, width), left * down, total)
                total = scaled(planes, pixel(x + 1, y + 1, height, width), right * down, total)
                language.store(chunk.row(i - start), 0, total)
            for k in range(count):
                target = output.row(first + k)
                for i in range(start, stop):
                    target[i] = chunk[i - start, k]


def add_up(input: Any, grad_points: Any, moves: Any) -> None:
    blocks, size = blocks_of(input), grad_points.shape[1]
    for n in range(grad_points.shape[0]):
        for i in range(size):
            for axis in range(2):
                total = language.zero(moves)
                for block in range(blocks):
                    total += moves[n * blocks + block, 2 * i + axis]
                grad_points[n, i, axis] = total


@library.register_kernel("examples::grid_sample_backward", ("cpu", "foo"))
@library.tile_kernel(
    tiles=count_tiles,
    contiguous_rows=True,
    scratch={
        "planes": PLANES,
        "sums": PLANES,
        "chunk": library.scratch(CHUNK, CHANNELS, like="input"),
        "moves": library.scratch(
            count_tiles, lambda points: 2 * points.shape[1], like="input", per_call=True
        ),
    },
    finish=add_up,
)
def backward_kernel(
    grad_output: Any, input: Any, points: Any, grad_input: Any, grad_points: Any,
    planes: Any, sums: Any, chunk: Any, moves: Any, tiles: Any,
) -> None:  # fmt: skip
    channels, height, width = input.shape[1], input.shape[2], input.shape[3]
    blocks, size = blocks_of(input), points.shape[1]
    zero = language.splat(language.zero(planes), CHANNELS)
    for tile in tiles:
        n, c = tile // blocks, tile % blocks * CHANNELS
        first, count = n * channels + c, min(CHANNELS, channels - c)
        gather_planes(planes, input, first, count)
        for i in range(height * width + 1):
            language.store(sums.row(i), 0, zero)
        for i in range(CHUNK):
            language.store(chunk.row(i), 0, zero)
        for start in range(0, size, CHUNK):
            stop = min(start + CHUNK, size)
            for k in range(count):
                source = grad_output.row(first + k)
                for i in range(start, stop):
                    chunk[i - start, k] = source[i]
            for i in range(start, stop):
                x, y, right, down = look_up(points, n * size + i, height, width)
                left, up = 1 - right, 1 - down
                a, b = pixel(x, y, height, width), pixel(x + 1, y, height, width)
                e, f = pixel(x, y + 1, height, width), pixel(x + 1, y + 1, height, width)
                g = load(chunk, i - start)
                add_to(sums, a, g, left * up)
                add_to(sums, b, g, right * up)
                add_to(sums, e, g, left * down)
                add_to(sums, f, g, right * down)
                of_a, of_b = product(load(planes, a), g, zero), product(load(planes, b), g, zero)
                of_e, of_f = product(load(planes, e), g, zero), product(load(planes, f), g, zero)
                move = moves.row(tile)
                move[2 * i] = 0.5 * width * (up * (of_b - of_a) + down * (of_f - of_e))
                move[2 * i + 1] = 0.5 * height * (left * (of_e - of_a) + right * (of_f - of_b))
        for k in range(count):
            for y in range(height):
                target = grad_input.row((first + k) * height + y)
                for i in range(width):
                    target[i] = sums[y * width + i, k]


# ------------------------------------------------------------------------------------------- fake


@library.register_fake("examples::grid_sample")
def fake(input: Tensor, points: Tensor) -> Tensor:
    if not input.is_floating_point():
        raise TypeError(f"grid_sample: input must be floating-point, got {input.dtype}")
    if input.dim() != 4:
        raise ValueError(f"grid_sample: input must have 4 dimensions, got {input.dim()}")
    if points.dtype != input.dtype:
        raise TypeError(f"grid_sample: grid must be {input.dtype} as input is, got {points.dtype}")
    if points.dim() != 3 or points.shape[0] != input.shape[0] or points.shape[2] != 2:
        raise ValueError(
            f"grid_sample: grid must have points of shape [{input.shape[0]}, P, 2] to match the "
            f"batch of input, got {list(points.shape)}"
        )
    return input.new_empty(input.shape[0], input.shape[1], points.shape[1])


@library.register_fake("examples::grid_sample_backward")
def fake_backward(grad_output: Tensor, input: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    shape = fake(input, points).shape
    if grad_output.shape != shape:
        raise ValueError(
            f"grid_sample_backward: grad_output must have shape {list(shape)}, "
            f"got {list(grad_output.shape)}"
        )
    return input.new_empty(input.shape), points.new_empty(points.shape)


# --------------------------------------------------------------------------------------- autograd

library.register_autograd("examples::grid_sample", "examples::grid_sample_backward")


# ---------------------------------------------------------------------------------------- samples


def reference(input: Tensor, points: Tensor) -> Tensor:
    """Weight all pixels, by hat functions that reach one pixel to each side."""
    height, width = input.shape[2:]
    u = ((points[..., 0] + 1) * width - 1) / 2
    v = ((points[..., 1] + 1) * height - 1) / 2
    across = (1 - (u[..., None] - torch.arange(width)).abs()).clamp(min=0)
    down = (1 - (v[..., None] - torch.arange(height)).abs()).clamp(min=0)
    return torch.einsum("nchw,npw,nph->ncp", input, across, down)


def sample(shape: tuple[int, ...], points: int, dtype: torch.dtype) -> Sample:
    """Make points, some outside, and none on a pixel, where there is no gradient."""
    input, drawn = random("grid_sample", shape, (shape[0], points, 2), dtype=torch.float64)
    sizes = torch.tensor([shape[3], shape[2]])
    places = (torch.sigmoid(drawn) * (sizes + 2) - 1).floor() + 0.5 + drawn.sin() / 4
    return Sample((input.to(dtype), ((2 * places + 1) / sizes.clamp(min=1) - 1).to(dtype)))


SPEC = OpSpec(
    operator=torch.ops.examples.grid_sample.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample((2, size, size, size + 1), size + 3, dtype),
    samples={
        "several blocks": lambda dtype: sample((1, 33, 5, 6), 70, dtype),
        "no points": lambda dtype: sample((1, 3, 4, 5), 0, dtype),
    },
    # In larger images a position rounds to a larger part of a pixel, so results would differ by
    # more.
    sizes=(0, 1, 7),
    essential=("size7", "no points"),
    large=lambda dtype: sample((2, 35, 17, 19), 301, dtype),
)
