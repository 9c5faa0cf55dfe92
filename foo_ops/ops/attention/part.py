"""Operators that compute one process's part of attention on several processes.

They are foo::attention_seeded, foo::attention_varlen_seeded and their backward operators, with more
arguments:

- dropout_heads: (B, Hq) int64, the numbers of heads, batch * Hq + head, among those of all
  processes. Dropout draws by these numbers, and so keeps the same weights as in one process.
- part_offset: the keys are a part of all keys. Query i stands at key i + part_offset, to which
  windows and ALiBi are aligned, and a backward pass gets the logsumexp of all keys.

They have no derivatives: DTensor and ring attention call them below autograd. DTensors are sharded
by batch and heads, packed sequences by heads; if heads of query share those of key and value, both
are sharded into equal parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops._process import after_import
from foo_ops.library.operators import find
from foo_ops.ops.attention.dense import backward_flops, fake_backward, fake_seeded, flops
from foo_ops.ops.attention.varlen import backward_flops as packed_backward_flops
from foo_ops.ops.attention.varlen import fake_backward as fake_packed_backward
from foo_ops.ops.attention.varlen import fake_seeded as fake_packed_seeded
from foo_ops.ops.attention.varlen import flops as packed_flops
from foo_ops.ops.attention.vmap import padded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

HEADS = "b h . ., b h . ., b h . ."
ADDED = "b h . ., b h, b h"
PACKED = "h ., h ., h ., ., ., ., ., h, h"


@dataclasses.dataclass(frozen=True)
class Part:
    """One of these operators.

    Attributes:
        whole: the operator without dropout_heads.
        fake, flops: that operator's fake kernel, and its count of operations.
        query: the position of the query among its tensors, of which the seed is the last.
        sharding: the names of the dimensions of tensors and results.
    """

    whole: str
    fake: Callable[..., Any]
    flops: Callable[..., int]
    query: int
    sharding: str
    options: str = ""

    @property
    def is_packed(self) -> bool:
        return "varlen" in self.whole

    @property
    def schema(self) -> Any:
        return find(f"foo::{self.whole}")._schema

    @property
    def tensors(self) -> int:
        """The number of tensors that the whole operator takes."""
        return sum("Tensor" in str(it.type) for it in self.schema.arguments)

    def batch(self, tensors: Sequence[Any]) -> int:
        """Return the number of sequences."""
        query, starts = tensors[self.query], tensors[self.query + 3]
        size: int = starts.shape[0] - 1 if self.is_packed else query.shape[0]
        return size


OFFSET = "SymInt? part_offset=None, "
PARTS = {
    "attention_part": Part(
        "attention_seeded",
        fake_seeded,
        flops,
        0,
        f"{HEADS}, {ADDED}, ., b h -> b h . ., b h .",
        OFFSET,
    ),
    "attention_part_backward": Part(
        "attention_backward",
        fake_backward,
        backward_flops,
        2,
        f"b h . ., b h ., {HEADS}, {ADDED}, b h . ., b h ., ., b h -> {HEADS}, {ADDED}",
        OFFSET,
    ),
    "attention_varlen_part": Part(
        "attention_varlen_seeded",
        fake_packed_seeded,
        packed_flops,
        0,
        f"{PACKED}, ., . h -> h ., h .",
    ),
    "attention_varlen_part_backward": Part(
        "attention_varlen_backward",
        fake_packed_backward,
        packed_backward_flops,
        2,
        f"h ., h ., {PACKED}, h ., h ., ., . h -> h ., h ., h ., h, h",
    ),
}


def define(name: str, part: Part) -> None:
    _, _, arguments = str(part.schema).partition("(")
    tensors, _, rest = arguments.partition(", *, ")
    library.define(
        f"foo::{name}",
        f"({tensors}, Tensor? dropout_heads=None, *, {part.options}{rest}",
        tags=torch.Tag.pt2_compliant_tag,
    )


def make_fake(part: Part) -> Callable[..., Any]:
    def fake(*inputs: Any, **options: Any) -> Any:
        *tensors, heads = padded(inputs, part.tensors + 1)
        outputs = part.fake(*tensors, **options)
        name = part.whole.removesuffix("_seeded")
        _C.check_attention_dropout_heads(name, tensors[part.query], heads, part.batch(tensors))
        return outputs

    return fake


for name, part in PARTS.items():
    define(name, part)
    library.register_fake(f"foo::{name}", make_fake(part))
    library.register_sharding(f"foo::{name}", part.sharding)
    library.register_flops(f"foo::{name}", takes_tensors=part.is_packed)(part.flops)


# ---------------------------------------------------------------------------------------- DTensor


def register() -> None:
    """Let DTensor, which is imported by now, call these operators instead of the whole ones."""
    from torch.distributed.tensor import DTensor

    for name, part in PARTS.items():
        rule = make_rule(name, part)
        for whole in dict.fromkeys((part.whole, part.whole.removesuffix("_seeded"))):
            library.register_torch_dispatch(f"foo::{whole}", DTensor, rule)


def make_rule(name: str, part: Part) -> Callable[..., Any]:
    operator = find(f"foo::{name}")

    @torch.no_grad()
    def rule(
        mode: Any, whole: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        *tensors, seed = padded(args, part.tensors)
        heads = None
        if kwargs.get("dropout_p", 0.0) > 0.0:
            seed, heads = numbered(tensors[part.query], seed, part.batch(tensors))
        return operator(*tensors, seed, heads, **kwargs)

    return rule


def numbered(query: DTensor, seed: Tensor | None, batch: int) -> tuple[DTensor, DTensor]:
    """Return the first process's seed, drawn if there is none, and the numbers of all heads."""
    from torch.distributed.tensor import DTensor

    heads = query.shape[1]
    numbers = torch.arange(batch * heads, device=query.device).view(batch, heads)
    if seed is None:
        seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=query.device)
    if not isinstance(seed, DTensor):
        seed = on_all(seed, query.device_mesh, src_data_rank=0)
    return seed, on_all(numbers, query.device_mesh, src_data_rank=None)


def on_all(tensor: Tensor, mesh: DeviceMesh, src_data_rank: int | None) -> DTensor:
    """Replicate a tensor to all processes, from one of them or as it is on each."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim, src_data_rank=src_data_rank)


after_import("torch.distributed.tensor", register)
