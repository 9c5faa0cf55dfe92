"""Compares flex attention with its targets: our own options, PyTorch's, and fewer blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import foo_ops
from benchmarks.measure import OURS, Case, Contenders, Local
from foo_ops.ops.attention.dense import attention

SECTION = "flex attention"
HEAD_DIM = 64
BLOCK = 128
DOCUMENTS = 8
WINDOW = 512
OF_PROPORTIONAL = 0.8
"""Least share of the speed that would be proportional to the remaining blocks."""
COMPILED, DENSE = "compiled flex", "dense"

Function = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """A variant of attention, and its peer.

    Attributes:
        least: the target for our speed relative to the peer.
    """

    variant: str
    direction: str
    dtype: str
    length: int
    heads: int
    peer: str
    least: float
    batch: int = 1

    @property
    def name(self) -> str:
        size = f"{self.heads} x {HEAD_DIM}, S {self.length}"
        return f"{self.variant}, {self.direction}, {self.dtype}, {size}, beside {self.peer}"

    def inputs(self) -> list[Tensor]:
        shape = (self.batch, self.heads, self.length, HEAD_DIM)
        needs_grad = self.direction == "backward"
        kind = getattr(torch, self.dtype)
        return [torch.randn(shape).to(kind).requires_grad_(needs_grad) for _ in range(3)]


def cases(length: int, dtypes: Sequence[str]) -> Iterator[Case]:
    """Use ``length`` for most rows, and four times as much where blocks are left out."""
    for row in rows(length, dtypes):
        prepare = partial(contenders, row)
        yield Case(SECTION, row.name, prepare, least=row.least, headline=True)


def rows(length: int, dtypes: Sequence[str]) -> Iterator[Row]:
    """List the rows; the targets of rows with blocks follow from the share of blocks left."""
    long = 4 * length
    for dtype in dtypes:
        compiled = 3.0 if dtype == "bfloat16" else 2.0
        yield Row("causal by a BlockMask", "forward", dtype, length, 8, "is_causal", 0.85)
        yield Row("ALiBi and causal", "forward", dtype, length, 8, COMPILED, compiled)
        yield Row("ALiBi and causal", "backward", dtype, length, 8, "alibi_slopes", 0.75)
        yield Row("ALiBi and causal", "backward", dtype, length, 8, "math", 5.0)
        for variant, reach in (("documents", document_reach), ("window", window_reach)):
            least = OF_PROPORTIONAL / blocks_left(*reach(long))
            for direction in ("forward", "backward"):
                yield Row(variant, direction, dtype, long, 2, DENSE, least)
        yield Row("relative positions", "backward", dtype, length // 2, 8, "attn_bias", 1.0)


# ------------------------------------------------------------------------------------- the variants


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def blocks(mask_mod: Function, length: int, batch: int | None = None) -> BlockMask:
    return create_block_mask(mask_mod, batch, None, length, length, device="cpu")


def causal_pair(row: Row) -> tuple[Function, Function]:
    ours = partial(foo_ops.flex_attention, block_mask=blocks(causal, row.length))
    return ours, partial(attention, is_causal=True)


def alibi_pair(row: Row) -> tuple[Function, Function]:
    slopes = 2.0 ** -torch.arange(1.0, row.heads + 1)

    def alibi(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key)

    given: dict[str, Any] = {"score_mod": alibi, "block_mask": blocks(causal, row.length)}
    peers: dict[str, Function] = {
        COMPILED: partial(torch.compile(torch_flex, dynamic=False), **given),
        "alibi_slopes": partial(attention, alibi_slopes=slopes, is_causal=True),
        "math": partial(math, slopes),
    }
    return partial(foo_ops.flex_attention, **given), peers[row.peer]


def math(slopes: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    positions = torch.arange(query.shape[2])
    distance = positions[:, None] - positions
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, bias.to(query.dtype))


def document_pair(row: Row) -> tuple[Function, Function]:
    of_position = document_of(row.length)

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return of_position[query] == of_position[key]

    ours = partial(foo_ops.flex_attention, block_mask=blocks(same_document, row.length))
    return ours, attention


def window_pair(row: Row) -> tuple[Function, Function]:
    def window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < WINDOW)

    ours = partial(foo_ops.flex_attention, block_mask=blocks(window, row.length))
    return ours, attention


def relative_pair(row: Row) -> tuple[Function, Function]:
    """Compare a table by head and distance with a bias for each pair; both are learned."""
    table = torch.randn(row.heads, 2 * row.length - 1)
    positions = torch.arange(row.length)
    places = positions[:, None] - positions + row.length - 1
    bias = table[None, :, places].to(getattr(torch, row.dtype)).requires_grad_()
    # Both have the same values, whatever the dtype of the bias.
    table = table.to(bias.dtype).requires_grad_()

    def relative(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + table[head, query - key + (row.length - 1)]

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return foo_ops.flex_attention(query, key, value, relative), table

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return attention(query, key, value, bias), bias

    return ours, theirs


PAIRS: dict[str, Callable[[Row], tuple[Function, Function]]] = {
    "causal by a BlockMask": causal_pair,
    "ALiBi and causal": alibi_pair,
    "documents": document_pair,
    "window": window_pair,
    "relative positions": relative_pair,
}


# ----------------------------------------------------------------------------- blocks that are left


def document_of(length: int) -> Tensor:
    """Return the document of each position; documents do not end at block boundaries."""
    size = length // DOCUMENTS - 24
    return (torch.arange(length) // size).clamp(max=DOCUMENTS - 1)


def document_reach(length: int) -> tuple[Tensor, Tensor]:
    """Return the first key and the last one that each query sees."""
    documents = document_of(length)
    last = torch.searchsorted(documents, documents, right=True) - 1
    return torch.searchsorted(documents, documents), last


def window_reach(length: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(length)
    return (positions - WINDOW + 1).clamp(min=0), positions


def blocks_left(first: Tensor, last: Tensor) -> float:
    """Return the share of blocks in which some query sees a key."""
    columns = last.view(-1, BLOCK).amax(1) // BLOCK - first.view(-1, BLOCK).amin(1) // BLOCK + 1
    return float(columns.sum()) / len(columns) ** 2


# -------------------------------------------------------------------------------------- contenders


def contenders(row: Row) -> Contenders:
    inputs = row.inputs()
    ours, theirs = PAIRS[row.variant](row)
    functions = {OURS: ours, row.peer: theirs}
    return {name: partial(local, row, name, it, inputs) for name, it in functions.items()}


def local(row: Row, name: str, function: Function, inputs: list[Tensor]) -> Local:
    # Dense attention sees more keys, so only shapes are compared.
    compared = shape_of if row.peer == DENSE else torch.clone
    if row.direction == "forward":
        return Local(partial(function, *inputs), torch.no_grad, compared)
    result = function(*inputs)
    output, *learned = result if isinstance(result, tuple) else (result,)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    differentiate = partial(
        torch.autograd.grad, output, [*inputs, *learned], gradient.to(output.dtype),
        retain_graph=True,
    )  # fmt: skip
    return Local(lambda: differentiate()[: len(inputs)], compared=compared)


def shape_of(tensor: Tensor) -> Tensor:
    return torch.tensor([float(it) for it in tensor.shape])
