"""foo::rotary_embedding in attention layers that call a function ``apply_rotary_pos_emb``."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foo_ops.integrations.transformers.replacement import (
    OtherGlobals,
    are_alike,
    has_numbers,
    has_own_forward,
    memory_order,
    permuted_back,
)
from foo_ops.library.operators import FLOATING
from foo_ops.ops.rotary_embedding import composite

FUNCTION = "apply_rotary_pos_emb"
PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]

Table = Callable[[Tensor], Tensor]
Rotation = Callable[..., tuple[Tensor, Tensor]]


def first_half(table: Tensor) -> Tensor:
    """Return the angles of a table that repeats them as a whole."""
    return table[..., : table.shape[-1] // 2]


def second_half(table: Tensor) -> Tensor:
    return table[..., table.shape[-1] // 2 :]


def every_second(table: Tensor) -> Tensor:
    """Return the angles of a table that repeats each of them twice in a row."""
    return table[..., ::2]


def every_other(table: Tensor) -> Tensor:
    return table[..., 1::2]


def whole(table: Tensor) -> Tensor:
    return table


COPIES: dict[Table, Table] = {first_half: second_half, every_second: every_other}
"""Where a table that has its angles twice holds the second copy."""


class Layout(NamedTuple):
    """How a function rotates query and key.

    Attributes:
        angles: how a table holds the angles.
        interleaved: whether pairs are adjacent elements, and not half a row apart.
        keeps_order: whether results have the memory order of their inputs, and are not always
            contiguous.
    """

    angles: Table
    interleaved: bool
    keeps_order: bool

    def table(self, angles: Tensor) -> Tensor:
        """Return a table that holds these angles."""
        if self.angles is first_half:
            return torch.cat((angles, angles), dim=-1)
        return angles.repeat_interleave(2, dim=-1) if self.angles is every_second else angles

    def turn(self, input: Tensor, cosine: Tensor, sine: Tensor) -> Tensor | None:
        """Rotate query or key, or return None if the operator cannot write the result."""
        rotate = torch.ops.foo.rotary_embedding.default
        if not self.keeps_order or input.is_contiguous():
            return rotate(input, cosine, sine, interleaved=self.interleaved)
        order = memory_order(input)
        if order is None or cosine.dim() != input.dim():
            return None
        given = (it.permute(order) for it in (input, cosine, sine))
        return permuted_back(rotate(*given, interleaved=self.interleaved), order)

    def read(self, tables: Sequence[Tensor], heads: int) -> Sequence[Tensor] | None:
        """Return the angles of tables as views, or None for tables that hold other values.

        For images with several positions, the two halves of a row may differ. This depends on
        values, so tables that repeat their angles are not read while a graph is traced.

        Args:
            heads: dimension of the heads in query and key, which the views get, too.
        """
        copies = COPIES.get(self.angles)
        if torch.compiler.is_compiling():
            return self.views(tables, heads) if copies is None else None
        if latest.layout is self and latest.heads == heads and is_latest(tables):
            return latest.views
        views = None
        if copies is None or (
            all(map(has_numbers, tables))
            and all(torch.equal(self.angles(it), copies(it)) for it in tables)
        ):
            views = self.views(tables, heads)
        if not any(it.requires_grad for it in tables):
            latest.layout, latest.heads, latest.tables = self, heads, tuple(tables)
            latest.versions, latest.views = versions_of(tables), views
        return views

    def views(self, tables: Sequence[Tensor], heads: int) -> Sequence[Tensor]:
        return [self.angles(it).unsqueeze(heads) for it in tables]


class Latest(threading.local):
    """The tables that this thread has read last; all layers of a model receive the same ones.

    A reference to them is kept, so that their identity stays unique.
    """

    layout: Layout | None = None
    heads = 0
    tables: Sequence[Tensor] = ()
    versions: Sequence[int] = ()
    views: Sequence[Tensor] | None = None


latest = Latest()


def is_latest(tables: Sequence[Tensor]) -> bool:
    kept = latest.tables
    same = len(tables) == len(kept) and all(a is b for a, b in zip(tables, kept))
    return same and latest.versions == versions_of(tables)


def versions_of(tables: Sequence[Tensor]) -> Sequence[int]:
    return [0 if it.is_inference() else it._version for it in tables]


class Form(NamedTuple):
    """How query and key are rotated (`Layout`), and a function that does it by foo's operator."""

    layout: Layout
    rotate: Rotation


LAYOUTS = [
    Layout(angles, interleaved, keeps_order)
    for angles, interleaved in (
        (first_half, False),  # Llama, and most others
        (whole, False),  # gpt-oss
        (every_second, True),  # Cohere
        (first_half, True),  # GLM
    )
    for keeps_order in (True, False)
]


@cache
def form_of(function: Callable[..., Any]) -> Form | None:
    """Return the form of a function, or None if it agrees with no known one on random numbers."""
    if list(inspect.signature(function).parameters) != PARAMETERS:
        return None
    layout = next((it for it in LAYOUTS if agrees(function, it)), None)
    if layout is None:
        return None
    return Form(layout, make_rotation(function, layout))


def make_rotation(own: Rotation, layout: Layout) -> Rotation:
    """Make a function that rotates query and key as ``own`` does, and calls it as a fallback."""
    heads = inspect.signature(own).parameters["unsqueeze_dim"].default

    def rotate(
        q: Tensor, k: Any = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = heads
    ) -> Any:
        angles = None
        if k is not None and are_alike(q, k, cos, sin):
            angles = layout.read((cos, sin), unsqueeze_dim)
        if angles is not None:
            query, key = (layout.turn(it, *angles) for it in (q, k))
            if query is not None and key is not None:
                return query, key
        return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    return rotate


def agrees(function: Callable[..., Any], layout: Layout) -> bool:
    """Whether a function rotates tensors of each dtype like this, and returns that dtype."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key, angles = random(2, 6, 5, 16), random(2, 2, 5, 16), layout.table(random(2, 5, 8))
    for dtype in FLOATING:
        q, k, cosine, sine = (it.to(dtype) for it in (query, key, angles.cos(), angles.sin()))
        for each, dim in (((q, k), 1), ((q.transpose(1, 2), k.transpose(1, 2)), 2)):
            try:
                own = function(*each, cosine, sine, dim)
            except Exception:  # tables of another form
                return False
            if not all(is_turned(*pair, cosine, sine, dim, layout) for pair in zip(own, each)):
                return False
    return True


def is_turned(
    own: Tensor, input: Tensor, cosine: Tensor, sine: Tensor, dim: int, layout: Layout
) -> bool:
    memory = torch.preserve_format if layout.keeps_order else torch.contiguous_format
    like = torch.empty_like(input, memory_format=memory)
    if (own.shape, own.dtype, own.stride()) != (like.shape, like.dtype, like.stride()):
        return False
    tables = (layout.angles(it.double()).unsqueeze(dim) for it in (cosine, sine))
    exact = composite(input.double(), *tables, interleaved=layout.interleaved)
    # Some functions compute in float32, also for float64.
    room = 16 * max(torch.finfo(own.dtype).eps, torch.finfo(torch.float32).eps)
    return torch.allclose(own.double(), exact, rtol=0, atol=room)


class FooRotaryAttention(OtherGlobals):
    """Replaces attention layers: their own forward, which looks up our rotation by its name."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        forward: Any = type(module).forward
        if not isinstance(forward, types.FunctionType) or has_own_forward(module):
            return False
        function = forward.__globals__.get(FUNCTION)
        if FUNCTION not in forward.__code__.co_names or function is None:
            return False
        return form_of(function) is not None

    @classmethod
    def names(cls, forward: Any) -> dict[str, Any]:
        form: Any = form_of(forward.__globals__[FUNCTION])
        return {**super().names(forward), FUNCTION: form.rotate}
