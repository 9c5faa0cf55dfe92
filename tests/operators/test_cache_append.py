"""foo::cache_append writes the given rows at the given places, or refuses and writes nothing."""

import re

import pytest
import torch
from support.processes import python
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import foo_ops

DENSE = {"key_cache": (2, 3, 8, 4), "value_cache": (2, 3, 8, 5), "key": (2, 3, 2, 4)}
DENSE |= {"value": (2, 3, 2, 5)}
PAGED = {"key_cache": (4, 2, 3, 4), "value_cache": (4, 2, 3, 5), "key": (2, 3, 3, 4)}
PAGED |= {"value": (2, 3, 3, 5)}


def arguments(shapes=DENSE, device="cpu", **changes):
    """Return valid arguments, with some replaced."""
    given = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}
    given["key_cache"].zero_()
    given["value_cache"].zero_()
    given["positions"] = torch.tensor([6, 1] if shapes is DENSE else [1, 0], device=device)
    if shapes is PAGED:
        given["block_table"] = torch.tensor([[2, 1], [3, 0]], device=device)
    return given | changes


def refused(error, message, given):
    caches = given["key_cache"], given["value_cache"]
    before = [it.clone() for it in caches]
    with pytest.raises(error, match=rf"\A{re.escape(message)}\Z"):
        foo_ops.cache_append(**given)
    assert all(map(torch.equal, caches, before))


def test_other_places_stay(device):
    given = arguments(device=device)
    foo_ops.cache_append(**given)
    expected = torch.zeros(2, 8)
    expected[0, 6:], expected[1, 1:3] = 1, 1
    for name in ("key_cache", "value_cache"):
        shape = given[name].shape
        assert torch.equal(given[name].cpu(), expected[:, None, :, None].expand(shape))


def test_blocks_that_are_not_written_are_not_looked_up(device):
    given = arguments(PAGED, device, block_table=torch.tensor([[2, 1], [3, 99]], device=device))
    given["key"], given["value"] = given["key"][:, :1], given["value"][:, :1]
    foo_ops.cache_append(**given)
    written = given["key_cache"].sum((2, 3)) / 12
    assert written.tolist() == [[0, 0], [0, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("positions", "wrong"), [([7, 0], 7), ([0, -1], -1), ([0, 2**63 - 1], 2**63 - 1)]
)
def test_positions_outside(positions, wrong, device):
    message = (
        "cache_append: positions must be in [0, 6], since the cache has 8 positions and 2 are "
        f"written, got {wrong}"
    )
    refused(
        ValueError,
        message,
        arguments(device=device, positions=torch.tensor(positions, device=device)),
    )


@pytest.mark.parametrize("wrong", [-1, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_outside(wrong, dtype, device):
    table = torch.tensor([[2, 1], [3, wrong]], dtype=dtype, device=device)
    message = (
        f"cache_append: block_table must be in [0, 3], since key_cache has 4 blocks, got {wrong}"
    )
    refused(ValueError, message, arguments(PAGED, device, block_table=table))


def test_more_than_the_cache_holds():
    message = (
        "cache_append: positions must be in [0, -1], since the cache has 8 positions and 9 are "
        "written, got 0"
    )
    new = {name: torch.ones(2, 3, 9, size) for name, size in (("key", 4), ("value", 5))}
    refused(ValueError, message, arguments(positions=torch.zeros(2, dtype=torch.int64), **new))


ERRORS = {
    "dimensions": (
        ValueError,
        {"key": torch.ones(2, 3, 2)},
        "key must have 4 dimensions, got 3",
    ),
    "value_cache": (
        ValueError,
        {"value_cache": torch.ones(2, 3, 7, 5)},
        "value_cache must have shape [2, 3, 8, 5] as key_cache has, got [2, 3, 7, 5]",
    ),
    "heads": (
        ValueError,
        {"key": torch.ones(2, 1, 2, 4)},
        "key must have shape [2, 3, 2, 4] as key_cache and key have, got [2, 1, 2, 4]",
    ),
    "batch": (
        ValueError,
        {"key": torch.ones(1, 3, 2, 4)},
        "key must have shape [2, 3, 2, 4] as key_cache and key have, got [1, 3, 2, 4]",
    ),
    "new": (
        ValueError,
        {"value": torch.ones(2, 3, 1, 5)},
        "value must have shape [2, 3, 2, 5] as value_cache and key have, got [2, 3, 1, 5]",
    ),
    "dtype": (
        TypeError,
        {"value": torch.ones(2, 3, 2, 5, dtype=torch.float64)},
        "value must be float32 as value_cache is, got float64",
    ),
    "positions": (
        ValueError,
        {"positions": torch.tensor([1])},
        "positions must have shape [2] to match the batch of key, got [1]",
    ),
    "dtype of positions": (
        TypeError,
        {"positions": torch.tensor([1.0, 2.0])},
        "positions must be int32 or int64, got float32",
    ),
    "device": (
        ValueError,
        {"positions": torch.tensor([1, 2], device="foo")},
        "positions must be on cpu as key_cache is, got foo:0",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    error, changes, message = ERRORS[name]
    refused(error, f"cache_append: {message}", arguments(**changes))


@pytest.mark.parametrize("name", [name for name in ERRORS if name != "device"])
def test_errors_of_fake_tensors(name):
    error, changes, message = ERRORS[name]
    with FakeTensorMode() as mode:
        given = {key: mode.from_tensor(it) for key, it in arguments(**changes).items()}
        with pytest.raises(error, match=re.escape(f"cache_append: {message}")):
            foo_ops.cache_append(**given)


def sharing():
    """Return, by name, argument changes that make caches share memory, and the error message."""
    cache, wide, elements = torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 6), torch.zeros(100)
    value = {"value": torch.ones(2, 3, 2, 4)}
    apart = "value_cache must not share memory with key_cache, since both are written"
    alone = "{} is written, so it must not have elements that share memory"
    return {
        "one": ({"key_cache": cache, "value_cache": cache} | value, apart),
        "views": ({"key_cache": cache, "value_cache": cache[:]} | value, apart),
        "slices": ({"key_cache": wide[..., :4], "value_cache": wide[..., 1:]}, apart),
        "expanded": ({"key_cache": cache[:1].expand(2, -1, -1, -1)}, alone.format("key_cache")),
        "expanded value": (
            {"value_cache": torch.zeros(2, 3, 8, 1).expand(-1, -1, -1, 5)},
            alone.format("value_cache"),
        ),
        "windows": (
            {"key_cache": elements.as_strided((2, 3, 8, 4), (9, 3, 1, 2))},
            alone.format("key_cache"),
        ),
    }


@pytest.mark.parametrize("name", sharing())
def test_caches_that_share_memory(name):
    changes, message = sharing()[name]
    refused(RuntimeError, f"cache_append: {message}", arguments(**changes))


@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("name", sharing())
def test_fake_caches_that_share_memory(name, is_symbolic):
    changes, message = sharing()[name]
    if is_symbolic and name not in ("one", "expanded", "expanded value"):
        pytest.skip("sizes that are symbols do not tell")
    with fakes(is_symbolic) as mode:
        given = {key: mode.from_tensor(it) for key, it in arguments(**changes).items()}
        with pytest.raises(RuntimeError, match=rf"\Acache_append: {re.escape(message)}\Z"):
            foo_ops.cache_append(**given)


def fakes(is_symbolic):
    return FakeTensorMode(shape_env=ShapeEnv()) if is_symbolic else FakeTensorMode()


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_fake_caches_beside_each_other(is_symbolic):
    """Slices of one tensor, an expanded dimension of size 1, and caches without elements."""
    wide, cache = torch.zeros(2, 3, 8, 9), torch.zeros(2, 3, 8, 4)
    empty = {name: torch.zeros(2, 3, 0, 4) for name in ("key_cache", "value_cache", "key", "value")}
    for changes in (
        {"key_cache": wide[..., 1:5], "value_cache": wide[..., [0]].expand(2, 3, 8, 1)},
        {"key_cache": wide[..., :4], "value_cache": wide[..., 4:]},
        {"key_cache": cache.as_strided((2, 3, 8, 4), (1, 64, 8, 2))},
        empty | {"value_cache": empty["key_cache"]},
    ):
        given = arguments(**changes)
        given["value"] = torch.ones(*given["key"].shape[:3], given["value_cache"].shape[3])
        with fakes(is_symbolic) as mode:
            foo_ops.cache_append(**{key: mode.from_tensor(it) for key, it in given.items()})


SHAPE = "must have shape [2, 2] to match the batch of key, got"
TABLES = [
    (torch.ones(3, 2, dtype=torch.int64), ValueError, f"{SHAPE} [3, 2]"),
    (torch.ones(2, dtype=torch.int64), ValueError, f"{SHAPE} [2]"),
    (torch.ones(2, 2), TypeError, "must be int32 or int64, got float32"),
]


@pytest.mark.parametrize(("table", "error", "message"), TABLES)
def test_errors_of_block_tables(table, error, message):
    refused(error, f"cache_append: block_table {message}", arguments(PAGED, block_table=table))


def test_empty_pages():
    """The block table is not read when nothing is written."""
    given = arguments(PAGED, block_table=torch.empty(2, 0, dtype=torch.int64))
    for name in ("key", "value"):
        given[name] = given[name][:, :0]
    foo_ops.cache_append(**given)
    for name in ("key", "value", "key_cache", "value_cache"):
        given[name] = arguments(PAGED)[name][:, :, :0]
    foo_ops.cache_append(**given)
    assert given["key_cache"].numel() == 0


def test_processes_can_have_heads_each():
    """On DTensors, caches are sharded along heads, and without pages along the batch."""
    program = """
import torch, foo_ops, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))

def written(way, positions_way, block_table=None):
    place = lambda tensor, way: DTensor.from_local(tensor, mesh, [way], run_check=False)
    cache = [place(torch.zeros(2, 4, 4, 3), way) for _ in range(2)]
    new = [place(torch.ones(2, 4, 1, 3), way) for _ in range(2)]
    if block_table is not None:
        new = [place(torch.ones(2, 1, 4, 3), way) for _ in range(2)]
        block_table = place(block_table, Replicate())
    foo_ops.cache_append(*cache, *new, place(torch.tensor([1, 2]), positions_way), block_table)
    return int(cache[0].to_local().sum())

assert written(Shard(0), Shard(0)) == written(Shard(1), Replicate()) == 24
assert written(Shard(2), Replicate(), torch.tensor([[0], [1]])) == 24
for way, table in ((Shard(3), None), (Shard(1), torch.tensor([[0], [1]]))):
    try:
        written(way, Replicate(), table)
    except NotImplementedError:
        pass
    else:
        raise AssertionError(way)
"""
    result = python(program)
    assert result.returncode == 0, result.stderr
