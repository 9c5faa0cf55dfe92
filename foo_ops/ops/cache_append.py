"""foo::cache_append writes new keys and values into a cache, after the earlier ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.library.operators import FLOATING, dtype_name
from foo_ops.ops.arguments import require_device, require_shape

NAME = "cache_append"
library.define(
    f"foo::{NAME}",
    "(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, Tensor positions, "
    "Tensor? block_table=None) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
INDICES = (torch.int32, torch.int64)


def cache_append(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """Write keys and values into a cache in place, without gradients.

    Args:
        key_cache, value_cache: (B, Hkv, S, D) and (B, Hkv, S, Dv), any strides; with block_table
            pages, (num_blocks, block_size, Hkv, D) and (num_blocks, block_size, Hkv, Dv).
            Floating-point of 16, 32 or 64 bits, integers or bool.
        key, value: (B, Hkv, new, D) and (B, Hkv, new, Dv); with block_table (B, new, Hkv, D) and
            (B, new, Hkv, Dv). Of the caches' dtypes.
        positions: (B,), int32 or int64: where the first new key of each sequence goes; the others
            follow.
        block_table: (B, blocks), int32 or int64: the blocks that hold a sequence's keys, in order.
            Blocks that are written must belong to one sequence only.

    Raises:
        ValueError: for shapes that do not fit, and for positions or blocks outside of the cache;
            nothing is written then.
        TypeError: for dtypes.

    Example:
        >>> keys, values = torch.zeros(2, 1, 1, 4, 1).unbind()
        >>> key, value = torch.ones(2, 1, 1, 2, 1).unbind()
        >>> foo_ops.cache_append(keys, values, key, value, torch.tensor([1]))
        >>> keys.flatten()
        tensor([0., 1., 1., 0.])
    """
    torch.ops.foo.cache_append.default(key_cache, value_cache, key, value, positions, block_table)


# ----------------------------------------------------------------------------------------- kernel


def count_tiles(key: Any) -> int:
    """Count the parts of key whose rows go to consecutive places."""
    return key.shape[0] * key.shape[1] if key.shape[2] > 0 else 0


def is_inside(key_cache: Any, key: Any, positions: Any, block_table: Any) -> bool:
    """Whether the cache has all the places that would be written."""
    if key.shape[0] * key.shape[1] * key.shape[2] == 0:
        return True
    if block_table is None:
        new, capacity = key.shape[2], key_cache.shape[2]
    else:
        new, capacity = key.shape[1], key_cache.shape[1] * block_table.shape[1]
    for batch in range(key.shape[0]):
        first = positions[batch]
        if first < 0 or first > capacity - new:
            return False
        if block_table is not None:
            size = key_cache.shape[1]
            for column in range(first // size, (first + new - 1) // size + 1):
                block = block_table[batch, column]
                if block < 0 or block >= key_cache.shape[0]:
                    return False
    return True


def refuse(key_cache: Tensor, key: Tensor, positions: Tensor, block_table: Tensor | None) -> None:
    """Raise the error for places that `is_inside` rejects."""
    new = key.shape[2] if block_table is None else key.shape[1]
    capacity = key_cache.shape[2]
    if block_table is not None:
        capacity = key_cache.shape[1] * block_table.shape[1]
    outside = positions[(positions < 0) | (positions > capacity - new)]
    if outside.numel():
        raise ValueError(
            f"{NAME}: positions must be in [0, {capacity - new}], since the cache has {capacity} "
            f"positions and {new} are written, got {outside[0].item()}"
        )
    assert block_table is not None
    columns = (positions[:, None] + torch.arange(new, device=positions.device)) // key_cache.shape[
        1
    ]
    blocks = block_table.gather(1, columns)
    blocks = blocks[(blocks < 0) | (blocks >= len(key_cache))]
    raise ValueError(
        f"{NAME}: block_table must be in [0, {len(key_cache) - 1}], since key_cache has "
        f"{len(key_cache)} blocks, got {blocks[0].item()}"
    )


def copy_rows(
    source: Any, batch: Any, outer: Any, cache: Any, block: Any, row: Any, first: Any
) -> None:
    """Copy source[batch, outer] to cache[block, row], from its row ``first`` on."""
    step = language.lanes(source)
    size = source.shape[3]
    whole = size - size % step
    x, y = source.data, cache.data
    x0 = batch * source.strides[0] + outer * source.strides[1]
    y0 = block * cache.strides[0] + row * cache.strides[1] + first * cache.strides[2]
    for _ in range(source.shape[2]):
        for i in range(0, whole, step):
            language.store(y, y0 + i, language.load_vector(x, x0 + i, step))
        for i in range(whole, size):
            language.store(y, y0 + i, language.load(x, x0 + i))
        x0, y0 = x0 + source.strides[2], y0 + cache.strides[2]


@library.tile_kernel(tiles=count_tiles, contiguous_rows=True, check=is_inside, refuse=refuse)
def kernel(
    key_cache: Any,
    value_cache: Any,
    key: Any,
    value: Any,
    positions: Any,
    block_table: Any,
    tiles: Any,
) -> None:
    for tile in tiles:
        batch, outer = tile // key.shape[1], tile % key.shape[1]
        if block_table is None:
            block, row, first = batch, outer, positions[batch]
        else:
            position = positions[batch] + outer
            block = block_table[batch, position // key_cache.shape[1]]
            row, first = position % key_cache.shape[1], 0
        copy_rows(key, batch, outer, key_cache, block, row, first)
        copy_rows(value, batch, outer, value_cache, block, row, first)


# ------------------------------------------------------------------------------------------- fake


def require_four(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise ValueError(f"{NAME}: {name} must have 4 dimensions, got {tensor.dim()}")


def require_readable(**caches: Tensor) -> None:
    for name, cache in caches.items():
        dtype = cache.dtype
        if dtype.is_complex or (dtype.is_floating_point and dtype not in FLOATING):
            raise TypeError(
                f"{NAME}: {name} must be float16, bfloat16, float32, float64, integers or bool, "
                f"got {dtype_name(dtype)}"
            )


def require_index(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in INDICES:
            raise TypeError(
                f"{NAME}: {name} must be int32 or int64, got {dtype_name(tensor.dtype)}"
            )


@library.register_fake(f"foo::{NAME}")
def fake(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    block_table: Tensor | None = None,
) -> None:
    tensors = {"key_cache": key_cache, "value_cache": value_cache, "key": key, "value": value}
    require_device(NAME, **tensors, positions=positions, block_table=block_table)
    require_four(**tensors)
    require_readable(key_cache=key_cache, value_cache=value_cache)
    require_shape(
        NAME, "value_cache", value_cache, (*key_cache.shape[:3], value_cache.shape[3]),
        "as key_cache has",
    )  # fmt: skip
    new = 2 if block_table is None else 1
    for name, cache in (("key", key_cache), ("value", value_cache)):
        shape = list(cache.shape)
        shape[new] = key.shape[new]
        if block_table is not None or name == "value":
            shape[0] = key.shape[0]
        require_shape(NAME, name, tensors[name], shape, f"as {name}_cache and key have")
        if tensors[name].dtype != cache.dtype:
            raise TypeError(
                f"{NAME}: {name} must be {dtype_name(cache.dtype)} as {name}_cache is, "
                f"got {dtype_name(tensors[name].dtype)}"
            )
    require_shape(NAME, "positions", positions, key.shape[:1], "to match the batch of key")
    require_index(positions=positions)
    if block_table is not None:
        columns = block_table.shape[-1] if block_table.dim() else 0
        require_shape(
            NAME, "block_table", block_table, (key.shape[0], columns), "to match the batch of key"
        )
        require_index(block_table=block_table)


library.register_kernel(f"foo::{NAME}", ("cpu", "foo"), kernel)


@library.register_sharding(f"foo::{NAME}")
def sharding(
    key_cache: Any, value_cache: Any, key: Any, value: Any, positions: Any, block_table: Any = None
) -> str:
    if block_table is None:
        return "b h . ., b h . ., b h . ., b h . ., b, . -> "
    return ". . h ., . . h ., . . h ., . . h ., ., . -> "
