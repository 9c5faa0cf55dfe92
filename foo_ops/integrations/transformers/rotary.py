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

from foo_ops.integrations.transformers.replacement import OtherGlobals, has_own_forward
from foo_ops.ops.rotary_embedding import rotary_embedding

FUNCTION = "apply_rotary_pos_emb"
PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]

Table = Callable[[Tensor], Tensor]
Rotation = Callable[..., tuple[Tensor, Tensor]]


def first_half(table: Tensor) -> Tensor:
    """Return the angles of a table that has them twice, one copy after the other."""
    return table[..., : table.shape[-1] // 2]


def second_half(table: Tensor) -> Tensor:
    return table[..., table.shape[-1] // 2 :]


def every_second(table: Tensor) -> Tensor:
    """Return the angles of a table that has each of them twice in a row."""
    return table[..., ::2]


def every_other(table: Tensor) -> Tensor:
    return table[..., 1::2]


def whole(table: Tensor) -> Tensor:
    return table


COPIES: dict[Table, Table] = {first_half: second_half, every_second: every_other}
"""How a table that has its angles twice holds them the second time."""


class Form(NamedTuple):
    """A way to turn query and key.

    Attributes:
        angles: how a table holds the angles.
        interleaved: whether neighbours turn together, and not the halves of a row.
    """

    angles: Table
    interleaved: bool

    def rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cosine, sine = (self.angles(table).unsqueeze(unsqueeze_dim) for table in (cos, sin))
        return tuple(  # type: ignore[return-value]
            rotary_embedding(each, cosine, sine, interleaved=self.interleaved) for each in (q, k)
        )

    def reads(self, tables: Sequence[Tensor]) -> bool:
        """Whether tables hold nothing but the angles that are read.

        Where images have several positions, the two halves of a row may differ. The values tell,
        so there is no answer in a graph that is being traced, nor on other devices.
        """
        copies = COPIES.get(self.angles)
        if copies is None:
            return True
        if torch.compiler.is_compiling():
            return False
        if seen.form is self and is_latest(tables):
            return seen.reads
        if any(type(it) is not Tensor or it.device.type not in DEVICES for it in tables):
            return False
        seen.form, seen.tables, seen.versions = self, tuple(tables), versions_of(tables)
        seen.reads = all(torch.equal(self.angles(it), copies(it)) for it in tables)
        return seen.reads


DEVICES = ("cpu", "foo")


class Seen(threading.local):
    """The tables that this thread has looked at last; all layers of a model are given the same.

    They are kept, so that no others are at their place.
    """

    form: Form | None = None
    tables: Sequence[Tensor] = ()
    versions: Sequence[int] = ()
    reads = False


seen = Seen()


def is_latest(tables: Sequence[Tensor]) -> bool:
    same = len(tables) == len(seen.tables) and all(a is b for a, b in zip(tables, seen.tables))
    return same and seen.versions == versions_of(tables)


def versions_of(tables: Sequence[Tensor]) -> Sequence[int]:
    return [0 if it.is_inference() else it._version for it in tables]


FORMS = [
    Form(angles, interleaved)
    for angles, interleaved in (
        (first_half, False),  # Llama, and most others
        (whole, False),  # gpt-oss
        (every_second, True),  # Cohere
        (first_half, True),  # GLM
    )
]


@cache
def form_of(function: Callable[..., Any]) -> Form | None:
    """Return the form that gives what a function gives on random numbers, if there is one."""
    if list(inspect.signature(function).parameters) != PARAMETERS:
        return None
    return next((form for form in FORMS if agrees(function, form)), None)


def agrees(function: Callable[..., Any], form: Form) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key, table = random(2, 6, 5, 16), random(2, 2, 5, 16), random(2, 5, 8)
    tables: dict[Table, Tensor] = {
        first_half: torch.cat((table, table), dim=-1),
        every_second: table.repeat_interleave(2, dim=-1),
        whole: table,
    }
    cosine, sine = tables[form.angles].cos(), tables[form.angles].sin()
    for query_, key_, dim in (
        (query, key, 1),
        (query.mT.mT.transpose(1, 2), key.transpose(1, 2), 2),
    ):
        arguments = (query_, key_, cosine, sine, dim)
        try:
            own, ours = function(*arguments), form.rotate(*arguments)
        except Exception:  # another form of the tables
            return False
        if not all(torch.allclose(*pair, atol=1e-5) for pair in zip(own, ours, strict=True)):
            return False
    return True


class FooRotaryAttention(OtherGlobals):
    """In the place of attention layers: their own forward, which finds our rotation by its name."""

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
        return {**super().names(forward), FUNCTION: rotation_of(forward.__globals__[FUNCTION])}


@cache
def rotation_of(function: Rotation) -> Rotation:
    """Return what computes what a model's function computes, by our operator where it can."""
    form: Any = form_of(function)
    heads = inspect.signature(function).parameters["unsqueeze_dim"].default

    def rotate(
        q: Tensor, k: Any = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = heads
    ) -> Any:
        is_whole = k is not None and cos is not None and sin is not None
        turn = form.rotate if is_whole and form.reads((cos, sin)) else function
        return turn(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    return rotate
