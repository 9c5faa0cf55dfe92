"""Weights of files are repacked for the kernels, whatever their sizes and strides."""

import pytest
import torch

pytest.importorskip("transformers")
from support.quantized_files import packed

from foo_ops.integrations.transformers.repacking import (
    pack_columns,
    pack_rows,
    read_codes,
    read_groups,
)

DEVICES = ["cpu", "foo"]
SIZES = [(1, 32, 32), (8, 64, 32), (24, 192, 64), (136, 256, 128), (264, 384, 64)]
"""Rows, columns and the size of groups: whole tiles, and parts of tiles."""


def random_integers(rows, columns):
    return torch.randint(16, (rows, columns), generator=torch.Generator().manual_seed(rows))


def numbers_of(bytes, group_size):
    """Return the integers of the kernels' layout: a group's first half in the lower bits."""
    groups = bytes.cpu().long().unflatten(1, (-1, group_size // 2))
    return torch.cat((groups % 16, groups // 16), -1).flatten(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("layout", ["rows", "transposed", "strided"])
@pytest.mark.parametrize(("rows", "columns", "group_size"), SIZES)
def test_rows(rows, columns, group_size, layout, has_order, device):
    integers = random_integers(rows, columns)
    words = packed(integers, 1).to(device)
    if layout == "transposed":
        words = words.t().contiguous().t()
    if layout == "strided":
        words = words.repeat_interleave(2, 1).repeat(1, 3)[:, : 2 * words.shape[1] : 2]
    order = torch.randperm(columns) if has_order else None
    expected = integers if order is None else integers[:, order]
    found = pack_rows(words, group_size, None if order is None else order.to(device))
    assert found.device.type == device
    assert torch.equal(numbers_of(found, group_size), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "columns", "group_size"), SIZES[1:])
def test_columns(rows, columns, group_size, device):
    integers = random_integers(rows, columns)
    words = packed(integers.t(), 1, order=(0, 2, 4, 6, 1, 3, 5, 7)).to(device)
    assert torch.equal(numbers_of(pack_columns(words, group_size), group_size), integers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.0, 2.0**-22, 3e-5, 2e-4, 0.3])
def test_scales_of_8_bits_are_rounded_up(factor, dtype):
    """No integer is beyond 127, and scales are neither 0 nor infinite."""
    codes = torch.randint(256, (40, 96), dtype=torch.uint8)
    table, factors = torch.linspace(-1, 1, 16), factor * torch.linspace(0.5, 1, 120).view(40, 3)
    integers, scale = read_codes(codes, table, factors, dtype)
    places = torch.stack((codes >> 4, codes & 15), -1).flatten(1).long()
    exact = factors.double().repeat_interleave(64, 1) * table.double()[places]
    info, largest = torch.finfo(dtype), exact.unflatten(1, (-1, 32)).abs().amax(-1)
    assert bool((scale > 0).all())
    assert bool(scale.isfinite().all())
    assert bool((127 * scale.double() >= largest * (1 - 2 * torch.finfo(torch.float32).eps)).all())
    found = integers.double().unflatten(1, (-1, 32)) * scale.double().unsqueeze(-1)
    errors = (found.flatten(1) - exact).unflatten(1, (-1, 32)).abs().amax(-1)
    room = largest / 254 * (1 + 2 * info.eps) + info.tiny * info.eps
    assert bool((errors <= room + 2 * torch.finfo(torch.float32).eps * largest).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_scales_of_16_bits(dtype):
    """Negative, subnormal and infinite ones, and those that are no numbers."""
    blocks = torch.zeros(64, 1024, 34, dtype=torch.uint8)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(64, 1024)
    blocks[..., :2] = halves.unsqueeze(-1).view(torch.uint8)
    integers, scale = torch.empty(64, 2**15, dtype=torch.int8), torch.empty(64, 1024, dtype=dtype)
    read_groups(blocks, integers, scale)
    torch.testing.assert_close(
        scale, halves.view(torch.float16).to(dtype), rtol=0, atol=0, equal_nan=True
    )
